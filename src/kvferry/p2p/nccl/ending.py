"""The call that frees a communicator, which may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.cuda.stream import beside_captures
from kvferry.errors import KVFerryError


class Ending:
    """Aborts one communicator, in a thread of its own that ends with that.

    A daemon: NCCL may never return from it, and the process has to be able to exit all the same. Nobody waits for it,
    the launcher's thread looks at `done`.
    """

    def __init__(self, call: Callable[[], None], device: int) -> None:
        self.error: KVFerryError | None = None
        self._call = call
        self._device = device
        self._done = threading.Event()
        threading.Thread(target=self._run, name=f"kvferry-nccl-end-{device}", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def _run(self) -> None:
        try:
            with beside_captures(self._device):
                self._call()
        except KVFerryError as error:  # the launcher's thread tells whom it concerns
            self.error = error
        finally:
            self._done.set()
