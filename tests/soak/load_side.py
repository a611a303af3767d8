"""An engine under load in a child process, as commands; forked by the zygote, since importing takes seconds."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvferry.client import CacheClient
from kvferry.errors import KVFerryError, RequestError
from soak.board import Board, Journal
from soak.content import PLANES, Content, PagedBytes
from soak.load import CHUNK_TOKENS, Habits, Share, Tokens, Worker

MODEL = "soak"  # one name for all layouts: what keeps them apart is the geometry alone
REGISTER_S = 20.0
FILL_S = 20.0
_TRY_AGAIN_S = 0.02


def block_tokens(layout: int) -> int:
    """Layout 0 has blocks of 16 tokens, 1 of 32, 2 of 64."""
    return 16 << layout


class LoadSide:
    """`run` returns at once: a thread registers, and starts the load of `threads` threads.

    Whatever `layout`, a chunk has `chunk_bytes`; each thread has blocks for `prompts` prompts.
    """

    def __init__(
        self,
        url: str,
        name: str,
        folder: str,
        *,
        engine_id: str,
        seed: int = 0,
        layout: int = 0,
        threads: int = 2,
        prompts: int = 4,
        chunk_bytes: int = 1 << 16,
        habits: dict[str, Any] | None = None,
    ) -> None:
        logging.getLogger("kvferry.client").setLevel(logging.ERROR)  # servers come and go here
        self._engine_id, self._name, self._seed, self._layout = engine_id, name, seed, layout
        self._habits = Habits(**(habits or {}))
        self._chunk_bytes = chunk_bytes
        blocks_a_chunk = CHUNK_TOKENS // block_tokens(layout)
        self._content = Content(layout, blocks_a_chunk, chunk_bytes // PLANES // blocks_a_chunk)
        self._blocks_a_thread = prompts * self._habits.max_chunks * self._content.blocks_a_chunk
        self._num_blocks = threads * self._blocks_a_thread
        heads = chunk_bytes // (PLANES * CHUNK_TOKENS * 8 * 4)
        cache = torch.zeros(2, 2, self._num_blocks, block_tokens(layout), heads, 8)
        self._layers = list(cache.unbind(0))
        self._board = Board(Path(folder) / f"{name}.board", threads + 1)
        self._journal = Journal(Path(folder) / f"{engine_id}.journal", f"{name} pid {os.getpid()}")
        self._paused = threading.Event()
        self._closing = threading.Event()
        self._workers: list[Worker] = []
        self._client: CacheClient | None = None
        self._url = url
        self._starter = threading.Thread(target=self._start, name="starter", daemon=True)

    def run(self) -> None:
        self._starter.start()

    def pause(self) -> dict[str, Any]:
        """Rest, and take all leases back that were left; whether all threads rest within 40 s."""
        self._paused.set()
        self._starter.join(REGISTER_S)
        rested = not self._starter.is_alive() and all(worker.resting.wait(40) for worker in self._workers)
        if rested and self._client is not None:
            for worker in self._workers:
                leases, worker.leases_left = worker.leases_left, []
                for lease_id in leases:
                    self._client.release(lease_id)
        return {"rested": rested}

    def resume(self) -> None:
        for worker in self._workers:
            worker.resting.clear()
        self._paused.clear()

    def facts(self) -> dict[str, Any]:
        """What must be the same whenever the engine rests: descriptors, without numbers, and threads."""
        found = sorted(re.sub(r"\d+", "#", _target(fd)) for fd in os.listdir("/proc/self/fd"))
        threads = sorted(re.sub(r"\d+", "#", thread.name) for thread in threading.enumerate())
        return {"fds": found, "threads": threads, "connected": self._client is not None and self._client.connected}

    def fill_memory(self, num_bytes: int) -> dict[str, Any]:
        """Store new chunks of `num_bytes` in all, once the load rests: how many the server then does not have."""
        assert self._client is not None
        left = num_bytes // self._chunk_bytes
        prompts = []
        while left:
            count = min(left, self._habits.max_chunks)
            left -= count
            prompts.append(np.random.default_rng((3, left)).integers(0, 50_000, count * CHUNK_TOKENS, dtype=np.int32))
        blocks = list(range(self._habits.max_chunks * self._content.blocks_a_chunk))
        until = time.monotonic() + FILL_S
        missing = 1
        while missing and time.monotonic() < until:  # a lower tier that is slow makes the server skip for a while
            for tokens in prompts:
                self._client.store(tokens, blocks).wait(FILL_S)
            missing = sum(len(tokens) - self._held(tokens) for tokens in prompts) // CHUNK_TOKENS
        return {"missing": missing}

    def _held(self, tokens: Tokens) -> int:
        assert self._client is not None
        found = self._client.lookup("held", tokens)
        self._client.release(found.lease_id)
        self._client.end_request("held")
        return found.tokens

    def clear(self) -> dict[str, Any]:
        """Forget all that engines with this layout have stored."""
        assert self._client is not None
        return {"chunks": self._client.clear()}

    def close(self) -> None:
        """End the load; then as an engine ends."""
        self._closing.set()
        self._starter.join(REGISTER_S)
        if not all(worker.stop() for worker in self._workers):
            self._journal.violation("the load does not end", threads=self.facts()["threads"])
        if self._client is not None:
            self._client.close()

    def _start(self) -> None:
        try:
            row = self._board.rows[-1]
            row.at("connect")
            self._client = CacheClient(self._url, required=False)
            row.at("register")
            self._register(self._client)
            row.at("end")
            self._start_workers(self._client)
        except Exception as error:  # noqa: BLE001 - nobody else would see it
            self._journal.violation("the engine could not start", error=repr(error))

    def _register(self, client: CacheClient) -> None:
        """Register, as soon as the server has noticed that the one before is dead."""
        until = time.monotonic() + REGISTER_S
        while not self._closing.is_set():
            try:
                client.register_kv_caches(
                    {f"layer.{index}": layer for index, layer in enumerate(self._layers)},
                    engine_id=self._engine_id,
                    model=MODEL,
                    format="vllm_flash_attention",
                )
                return
            except KVFerryError as error:
                code = error.code if isinstance(error, RequestError) else type(error).__name__
                self._journal.error("register", error=str(error), code=code)
                if time.monotonic() > until:
                    raise
            self._closing.wait(_TRY_AGAIN_S)

    def _start_workers(self, client: CacheClient) -> None:
        memory = PagedBytes(self._layers, self._num_blocks)
        for number, row in enumerate(self._board.rows[:-1]):
            first = number * self._blocks_a_thread
            share = Share(
                client=client,
                memory=memory,
                content=self._content,
                blocks=range(first, first + self._blocks_a_thread),
                row=row,
                journal=self._journal,
                dice=random.Random(f"{self._seed} {self._name} {number}"),
            )
            worker = Worker(f"{self._name}.{number}", share, self._habits, self._paused)
            self._workers.append(worker)
            worker.start()


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "gone"  # the one that listed them
