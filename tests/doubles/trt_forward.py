"""The forwards of a `FakeTrtExecutor`: a rank reads and writes KV, with the connector's hooks around each layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from doubles.trt_blocks import Memory
from doubles.trt_requests import Request, Setup, State


class Forward:
    """On a GPU the work is on a stream of its own, as since 1.2: it waits for the default one, and is waited for after.

    `wait_for_save` is called before that, with the default stream.
    """

    def __init__(self, setup: Setup, workers: Sequence[Any], callables: Sequence[Callable[[], None] | None]) -> None:
        self._setup = setup
        self._workers = workers
        self._callables = callables
        self._streams: dict[int, Any] = {}

    def stream(self, memory: Memory) -> Any:
        """The calling thread's current stream; on the host there are none."""
        return torch.cuda.current_stream() if memory.pool.is_cuda else SimpleNamespace()

    def compute(self, rank: int, memory: Memory, batch: Sequence[Request], *, hooks: bool) -> None:
        """One rank's part of a step."""
        worker = self._workers[rank]
        with self._execution(rank, memory):
            for layer in range(self._setup.shape.layers):
                if hooks:
                    worker.wait_for_layer_load(layer, self.stream(memory))
                for request in batch:
                    hashes = request.hashes
                    start = len(hashes) - 1 if request.state is State.GENERATION else request.position
                    memory.check(request.blocks, hashes, start, layer)
                    cycles = self._setup.slow_cycles
                    memory.write(request.blocks, hashes[: start + request.chunk], start, layer, slow_cycles=cycles)
                if hooks:
                    worker.save_kv_layer(layer, self.stream(memory))
            after = self._callables[rank]
            if after is not None:
                after()
        worker.wait_for_save(self.stream(memory))
        if memory.pool.is_cuda:
            torch.cuda.current_stream().wait_stream(self._streams[rank])

    @contextlib.contextmanager
    def _execution(self, rank: int, memory: Memory) -> Iterator[None]:
        if not memory.pool.is_cuda:
            yield
            return
        if rank not in self._streams:
            self._streams[rank] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream = self._streams[rank]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
