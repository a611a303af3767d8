"""A reference engine in a process of its own: `python -m kvferry.reference.worker`.

The commands below, one a line, are its whole interface; `EngineProcess` is the other end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from kvferry.client import CacheClient
from kvferry.reference.engine import EngineConfig, ReferenceEngine, Request
from kvferry.reference.process import answer_lines

__all__ = [
    "Command",
    "Exit",
    "Generate",
    "Init",
    "Lookup",
    "Prefill",
    "Stats",
    "Store",
    "Worker",
    "main",
]


class Command(msgspec.Struct, frozen=True, tag_field="command", tag=str.lower, forbid_unknown_fields=True):
    """One line from the driver."""


class Init(Command, frozen=True):
    """Build the engine; with `server`, connect and register. Replies kv_bytes and device_bytes."""

    engine: EngineConfig
    engine_id: str = "reference"
    server: str | None = None


class Prefill(Command, frozen=True):
    """Compute a prompt and keep its KV. Replies request, first_token, ms."""

    tokens: list[int]


class Store(Command, frozen=True):
    """Store the whole chunks of a kept prompt. Replies stored_tokens, ms."""

    request: str


class Lookup(Command, frozen=True):
    """Ask the server how many tokens of a prompt it holds. Replies tokens, ms."""

    tokens: list[int]


class Generate(Command, frozen=True):
    """Serve one prompt; see `ReferenceEngine.generate`. Replies the fields of `Generation`."""

    tokens: list[int]
    max_new_tokens: int = 16
    reuse: bool = False
    kv_of: list[int] | None = None
    store: bool = False


class Stats(Command, frozen=True):
    """Replies the server's counters under `server`."""


class Exit(Command, frozen=True):
    """Close everything and end."""


Reply = dict[str, Any]
_COMMANDS = Init | Prefill | Store | Lookup | Generate | Stats | Exit


class Worker:
    """Turns commands into engine calls."""

    def __init__(self) -> None:
        self._engine: ReferenceEngine | None = None
        self._client: CacheClient | None = None
        self._requests: dict[str, Request] = {}
        self._handlers: dict[type[Command], Callable[[Any], Reply]] = {
            Init: self._init,
            Prefill: self._prefill,
            Store: self._store,
            Lookup: self._lookup,
            Generate: self._generate,
            Stats: self._stats,
            Exit: lambda _: {},
        }

    def handle(self, command: Command) -> Reply:
        return self._handlers[type(command)](command)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _init(self, command: Init) -> Reply:
        if self._engine is not None:
            raise ValueError("this worker has an engine already; start another worker for another engine")
        engine = ReferenceEngine(command.engine)
        if command.server is not None:
            self._client = CacheClient(command.server)
            engine.connect(self._client, command.engine_id)
        self._engine = engine
        cuda = engine.device.type == "cuda"
        device_bytes = torch.cuda.memory_reserved(engine.device) if cuda else 0
        return {"kv_bytes": engine.cache.num_bytes, "device_bytes": device_bytes}

    def _prefill(self, command: Prefill) -> Reply:
        engine = self._ready()
        started = time.perf_counter()
        request = engine.open(command.tokens)
        first = int(engine.prefill(request).argmax().item())
        self._requests[request.request_id] = request
        return {"request": request.request_id, "first_token": first, "ms": _ms_since(started)}

    def _store(self, command: Store) -> Reply:
        request = self._requests.get(command.request)
        if request is None:
            raise ValueError(f"no kept request {command.request!r}; kept are {sorted(self._requests)}")
        started = time.perf_counter()
        return {"stored_tokens": self._ready().store(request), "ms": _ms_since(started)}

    def _lookup(self, command: Lookup) -> Reply:
        started = time.perf_counter()
        client = self._connected()
        promise = client.lookup("lookup", command.tokens)
        elapsed = _ms_since(started)
        if promise.tokens:
            client.release(promise.lease_id)
        return {"tokens": promise.tokens, "ms": elapsed}

    def _generate(self, command: Generate) -> Reply:
        generation = self._ready().generate(
            command.tokens,
            command.max_new_tokens,
            reuse=command.reuse,
            kv_of=command.kv_of,
            store=command.store,
        )
        return vars(generation).copy()

    def _stats(self, command: Stats) -> Reply:
        return {"server": msgspec.to_builtins(self._connected().stats())}

    def _ready(self) -> ReferenceEngine:
        if self._engine is None:
            raise ValueError("no engine yet; send init first")
        return self._engine

    def _connected(self) -> CacheClient:
        if self._client is None:
            raise ValueError("no cache server; send init with `server`")
        return self._client


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    worker = Worker()
    try:
        answer_lines(_COMMANDS, worker.handle, Exit)
    finally:
        worker.close()


if __name__ == "__main__":
    main()
