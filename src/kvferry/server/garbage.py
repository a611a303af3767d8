"""Python's cyclic garbage collector in a process that keeps very many objects for very long."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class Garbage:
    """While this is open a full collection walks what is new since the last one, and nothing older.

    Without it each one stops all threads for as long as it takes to walk every chunk of the index: 0.25 s for 300,000.
    What has survived one is never looked at again. It is freed as usual once nobody holds it, but for what has come to
    lie in a cycle; chunks do not, nor do sessions that have ended. For one owner; the collector is the process's.
    """

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()  # what is imported by now stays; a collection of it takes 0.1 s and more
        gc.callbacks.append(self._on_collected)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._on_collected)

    def _on_collected(self, phase: str, info: Mapping[str, Any]) -> None:
        """Called by whatever thread has just collected."""
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()
