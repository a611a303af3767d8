"""A server in a process of its own that listens at TCP, too, and engines that reach it there with a token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving.process import Side, Stage, Zygote
from serving.tokens import TOKENS, text_of, token_file


class TcpStage:
    """`stage` is the same server by its Unix socket."""

    def __init__(self, zygote: Zygote, folder: Path, **config: Any) -> None:
        self.stage = Stage(zygote, folder, listen="tcp://127.0.0.1:0", token_file=token_file(folder), **config)
        _, self.url = self.stage.server.call("urls")["urls"]

    def engine(self, token: str = "a", **arguments: Any) -> Side:
        """See `Stage.engine`."""
        return self.stage.engine(url=self.url, token=text_of(TOKENS[token]), **arguments)

    def mapped(self) -> int:
        """How many allocations of engines the server has mapped."""
        mapped: int = self.stage.server.call("mappings")["mapped"]
        return mapped


@contextlib.contextmanager
def tcp_stage(zygote: Zygote, folder: Path, **config: Any) -> Iterator[TcpStage]:
    made = TcpStage(zygote, folder, **config)
    try:
        yield made
    finally:
        made.stage.close()
