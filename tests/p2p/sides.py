"""p2p engines in processes of their own, for one test."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from serving.process import Side, Zygote, eventually

CACHES = {"num_blocks": 64, "num_layers": 4}
BIG = {"num_blocks": 256, "num_layers": 4, "heads": 8}  # 16 MiB a layer, of which most are sent
BLOCKS = list(range(8, 256))
FEW = [3, 1, 4, 2]


class Sides:
    """Starts them, and ends all of them, also those that are stopped."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._sides: list[Side] = []

    def start(self, *, caches: dict[str, int] | None = None, **config: Any) -> Side:
        """An engine with caches of 64 blocks and 4 layers, unless they are told otherwise."""
        side = self._zygote.start("p2p", caches={**CACHES, **(caches or {})}, **config)
        self._sides.append(side)
        return side

    def close(self) -> None:
        for side in self._sides:
            with contextlib.suppress(ProcessLookupError):
                os.kill(side.pid, signal.SIGCONT)
            with contextlib.suppress(OSError):
                side.close()
        for side in self._sides:
            eventually(lambda pid=side.pid: not os.path.exists(f"/proc/{pid}"), 20)  # type: ignore[misc]


def address_of(side: Side) -> str:
    """Where peers reach it."""
    address: str = side.call("address")["address"]
    return address


def begin(sender: Side, receiver: Side, name: str) -> None:
    """A transfer of which the first layer has landed and the others are on their way."""
    receiver.call("receive", name=name, blocks=BLOCKS, within_s=40)
    sender.call("send", name=name, blocks=BLOCKS, to=address_of(receiver), layer_wise=True)
    sender.call("layer_ready", name=name, layer=0)
    receiver.call("wait_layer", name=name, layer=0)
    for layer in (1, 2, 3):
        sender.ask("layer_ready", name=name, layer=layer)
        if layer < 3:
            sender.answer()


def send_and_check(sender: Side, receiver: Side, name: str) -> None:
    """A small transfer between two that live."""
    receiver.call("receive", name=name, blocks=FEW, within_s=30)
    sender.call("send", name=name, blocks=FEW, to=address_of(receiver))
    assert receiver.call("wait", what=f"receive {name}") == {"code": None}
    assert sender.call("wait", what=f"send {name}") == {"code": None}
    assert receiver.call("digest", blocks=FEW) == sender.call("digest", blocks=FEW)


def check_carrier(side: Side, carrier: str) -> None:
    """All sessions of an engine that has some use this one."""
    assert set(side.call("stats")["stats"]["peers"].values()) == {carrier}
