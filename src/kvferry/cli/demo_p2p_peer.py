"""An engine of `kvferry demo --p2p` in a process of its own; its part is in the commands that it gets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kvferry import ipc
from kvferry.p2p import P2pConfig, Sending
from kvferry.reference import EngineConfig, ReferenceEngine
from kvferry.reference.engine import Request
from kvferry.reference.process import answer_lines
from kvferry.reference.transfers import Expected, KVTransfers
from kvferry.reference.worker import Command, Exit, Generate

__all__ = ["HEARTBEAT_S", "Await", "Continue", "Expect", "Init", "Peer", "Prefill", "SendAgain", "Stats"]

HEARTBEAT_S = 2.0


class Init(Command, frozen=True):
    """Build the engine. Replies its address."""

    engine: EngineConfig
    carrier: str


class Prefill(Command, frozen=True):
    """Compute a prompt, send its KV layer by layer, keep it under the transfer's name. Replies computed_at."""

    transfer: str
    tokens: list[int]
    to: str


class SendAgain(Command, frozen=True):
    """Send what `Prefill` kept as `kept`; say only of so many layers that they are ready. Replies started_at."""

    transfer: str
    kept: str
    to: str
    num_layers: int


class Expect(Command, frozen=True):
    """Let the KV of a prompt come. Replies started_at."""

    transfer: str
    tokens: list[int]
    max_new_tokens: int


class Await(Command, frozen=True):
    """Wait for one layer of what is expected."""

    transfer: str
    layer: int


class Continue(Command, frozen=True):
    """Answer an expected prompt. Replies the fields of `Answer`."""

    transfer: str
    max_new_tokens: int


class Stats(Command, frozen=True):
    """Replies the carrier of each session, and why it is no better one."""


class Peer:
    """Turns commands into calls."""

    def __init__(self) -> None:
        self._engine: ReferenceEngine | None = None
        self._transfers: KVTransfers | None = None
        self._timeout_s = 0.0
        self._kept: dict[str, Request] = {}
        self._sendings: list[Sending] = []
        self._expected: dict[str, Expected] = {}
        self._handlers: dict[type[Command], Callable[[Any], dict[str, Any] | None]] = {
            Init: self._init,
            Prefill: self._prefill,
            SendAgain: self._send_again,
            Expect: self._expect,
            Await: self._await,
            Continue: self._continue,
            Generate: self._generate,
            Stats: self._stats,
            Exit: lambda _: None,
        }

    def handle(self, command: Command) -> dict[str, Any]:
        return self._handlers[type(command)](command) or {}

    def close(self) -> None:
        if self._transfers is not None:
            self._transfers.close()

    def _init(self, command: Init) -> dict[str, Any]:
        config = command.engine
        if config.device != "cpu":
            torch.cuda.set_device(config.device)
        engine = ReferenceEngine(config)
        if config.device == "cpu":
            ipc.rehome(engine.cache.layers)  # so that another engine of this host can map them
        self._timeout_s = config.timeout_s
        settings = P2pConfig(
            carrier=command.carrier, kv_buffer_size=1 << 20, heartbeat_s=HEARTBEAT_S, lease_s=config.timeout_s
        )
        self._transfers = KVTransfers(engine, settings)
        self._engine = engine
        return {"address": self._transfers.p2p.address}

    def _prefill(self, command: Prefill) -> dict[str, Any]:
        request, sending, computed_at = self._made.prefill(command.transfer, command.tokens, command.to)
        self._kept[command.transfer] = request
        sending.wait(self._timeout_s)
        return {"computed_at": computed_at}

    def _send_again(self, command: SendAgain) -> dict[str, Any]:
        started_at = time.monotonic()
        request = self._kept[command.kept]
        self._sendings.append(self._made.send_again(command.transfer, request, command.to, command.num_layers))
        return {"started_at": started_at}

    def _expect(self, command: Expect) -> dict[str, Any]:
        started_at = time.monotonic()
        self._expected[command.transfer] = self._made.expect(
            command.transfer, command.tokens, command.max_new_tokens, self._timeout_s
        )
        return {"started_at": started_at}

    def _await(self, command: Await) -> None:
        self._expected[command.transfer].receiving.wait_layer(command.layer, self._timeout_s)

    def _continue(self, command: Continue) -> dict[str, Any]:
        return self._made.answer(self._expected.pop(command.transfer), command.max_new_tokens)._asdict()

    def _generate(self, command: Generate) -> dict[str, Any]:
        assert self._engine is not None
        return vars(self._engine.generate(command.tokens, command.max_new_tokens)).copy()

    def _stats(self, command: Stats) -> dict[str, Any]:
        stats = self._made.p2p.stats()
        why = [stats["not_offered"], *stats["fallbacks"].values()]
        return {"carriers": sorted(set(stats["peers"].values())), "why": "; ".join(text for text in why if text)}

    @property
    def _made(self) -> KVTransfers:
        assert self._transfers is not None, "the demo sends init first"
        return self._transfers


def main() -> None:
    peer = Peer()
    try:
        answer_lines(
            Init | Prefill | SendAgain | Expect | Await | Continue | Generate | Stats | Exit,
            peer.handle,
            Exit,
        )
    finally:
        peer.close()


if __name__ == "__main__":
    main()
