"""Memory with lower tiers below it, without a server: the test's own thread is the loop."""

from __future__ import annotations

import hashlib
import queue
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from doubles.memory_tier import MemoryTier
from kvferry.cache import Chunk, ChunkIndex, SlabPool, Space
from kvferry.cache.tiers import ChunkName, Tier
from kvferry.cache.tiers.disk import DiskTier
from kvferry.server.tiers.fetches import Fetch
from kvferry.server.tiers.lower_tiers import LowerTiers
from kvferry.server.tiers.room import TierLimits
from kvferry.server.tiers.tasks import TierCompletion
from kvferry.server.tiers.threads import TierThreads

CHUNK = 4096
SPACE = Space("t", b"s" * 32)


def keys(prompt: str) -> list[bytes]:
    """One key a letter; prompts that start alike share keys."""
    return [hashlib.sha256(prompt[: end + 1].encode()).digest() for end in range(len(prompt))]


def bytes_of(key: bytes) -> bytes:
    """What a chunk of that key holds."""
    return key * (CHUNK // len(key))


def name(prompt: str) -> ChunkName:
    """The name of the prompt's last chunk."""
    return ChunkName(SPACE.digest, keys(prompt)[-1])


class TierBench:
    """`num_chunks` of memory over tiers of this process; `quotas` are those on disk and in the remote tier."""

    def __init__(
        self,
        num_chunks: int = 8,
        *,
        disk: MemoryTier | DiskTier | None = None,
        disk_bytes: int = 1 << 30,
        remote: MemoryTier | None = None,
        write_back: bool = False,
        quotas: tuple[Mapping[str, int], ...] = (),
    ) -> None:
        self.disk = disk if isinstance(disk, MemoryTier) else None
        self.remote = remote
        self.memory = np.zeros(num_chunks * CHUNK, np.uint8)
        self.pool = SlabPool()
        self.pool.add_area(0, self.memory.size)
        self.index = ChunkIndex(self.pool)
        self.posted: queue.SimpleQueue[TierCompletion] = queue.SimpleQueue()
        self.later_s = 0.0
        self.tiers = LowerTiers(
            self.index,
            self.pool,
            disk=None if disk is None else self._threads(disk),
            limits=TierLimits(disk_bytes, *quotas),
            remote=None if remote is None else self._threads(remote),
            write_back=write_back,
        )
        self._handlers = self.tiers.handlers()
        self.tiers.start()

    def _threads(self, tier: Tier) -> TierThreads:
        return TierThreads(tier, memory_address=self.memory.ctypes.data, post=self.posted.put)

    def close(self) -> None:
        for tier in (self.disk, self.remote):
            if tier is not None:
                tier.let_go()
        assert not self.tiers.stop(10)

    def step(self, timeout_s: float = 10.0) -> None:
        """Handle the next item, after what is left of those before."""
        while self.tiers.more:
            self.tick()
        item = self.posted.get(timeout=timeout_s)
        self._handlers[type(item)](item)

    def until(self, condition: Callable[[], bool]) -> None:
        """Handle items until the condition holds."""
        while not condition():
            self.step()

    def settle(self) -> None:
        """Until nothing is going on any more."""
        self.until(lambda: not self.busy)

    @property
    def busy(self) -> bool:
        """Whether anything is to be written, or in flight."""
        return self.in_flight or bool(self.values().get("writes"))

    @property
    def in_flight(self) -> bool:
        """Whether the tiers' threads have anything to do."""
        values = self.values()
        queued = sum(values[key] for key in ("disk_queue", "remote_queue") if key in values)
        return bool(queued or values.get("disk_scanning"))

    def tick(self, later_s: float = 0.0) -> None:
        """Let time pass."""
        self.later_s += later_s
        self.tiers.tick(time.monotonic() + self.later_s)

    def store(self, prompt: str, start: int = 0) -> int:
        """Store a prompt's chunks, as an engine does; how many are in memory by that."""
        chain = keys(prompt)
        reservation = self.index.reserve(SPACE, chain, CHUNK, start)
        for chunk in reservation.chunks:
            self.memory[chunk.offset : chunk.offset + CHUNK] = np.frombuffer(bytes_of(chunk.key), np.uint8)
        self.tiers.on_stored(self.index.commit(reservation.chunks, dirty=self.tiers.exist))
        return reservation.num_present + len(reservation.chunks)

    def fetch(self, prompt: str) -> Fetch | None:
        return self.tiers.fetch(SPACE, keys(prompt), self.have(prompt), CHUNK)

    def load(self, prompt: str) -> int:
        """Have what is there loaded; how many chunks memory has then, of which every byte is checked."""
        fetch = self.fetch(prompt)
        if fetch is not None:
            ended: list[bool] = []
            fetch.on_end(lambda: ended.append(True))
            self.until(lambda: bool(ended))
        return self.check(prompt)

    def have(self, prompt: str) -> int:
        last = self.index.lookup(SPACE, keys(prompt))
        return 0 if last is None else last.depth

    def check(self, prompt: str) -> int:
        """How many chunks are in memory; each of them is right."""
        last = self.index.lookup(SPACE, keys(prompt))
        for chunk in [] if last is None else last.chain():
            held = self.memory[chunk.offset : chunk.offset + CHUNK].tobytes()
            assert held == bytes_of(chunk.key), chunk
        return 0 if last is None else last.depth

    def forget_memory(self) -> None:
        """Evict all that may go."""
        while self.index.evict_one():
            pass

    def chunks(self, prompt: str) -> Sequence[Chunk]:
        last = self.index.lookup(SPACE, keys(prompt))
        return [] if last is None else last.chain()

    def values(self) -> dict[str, float]:
        return self.tiers.values()
