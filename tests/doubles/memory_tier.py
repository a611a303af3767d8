"""A lower tier in this process's memory, that can be told to stop, to fail, and to spoil what it has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import xxhash

from kvferry.cache.tiers import ChunkMeta, ChunkName
from kvferry.cache.tiers.disk import StoredChunk
from kvferry.cache.tiers.format import HEADER_BYTES
from kvferry.errors import ChunkCorruptError, ChunkMissingError, DeadlineError, TierFullError

WAIT_S = 20.0


class MemoryTier:
    """Keeps what it is given, whole and checked, as any tier has to.

    `limit_bytes` is what fits. `failures` has the errors that calls raise, by the call's name, or by the chunk's for
    those that write or read it; calls in `stopped`, named in the same way, wait until they are let go. `log` has the
    calls that began.
    """

    def __init__(self, name: str = "disk", num_threads: int = 2, limit_bytes: int = 1 << 40) -> None:
        self.name = name
        self.num_threads = num_threads
        self.limit_bytes = limit_bytes
        self.chunks: dict[ChunkName, tuple[ChunkMeta, bytes, bytes]] = {}
        self.failures: dict[str | ChunkName, Exception] = {}
        self.stopped: set[str | ChunkName] = set()
        self.mtimes: dict[ChunkName, int] = {}
        self.log: list[str] = []
        self.num_inside = self.num_torn = self.num_unlisted = 0
        self.num_opened = 1
        self.num_closed = 0
        self.on_written: Callable[[ChunkMeta, bytes], None] = lambda meta, data: None
        self._changed = threading.Condition()

    def stop(self, *calls: str | ChunkName) -> None:
        """From now on these wait."""
        with self._changed:
            self.stopped.update(calls)

    def let_go(self, *calls: str | ChunkName) -> None:
        """These wait no more; without any, none does."""
        with self._changed:
            self.stopped = self.stopped - set(calls) if calls else set()
            self._changed.notify_all()

    def wait_inside(self, count: int) -> None:
        """Return when so many calls are held up."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_inside == count, WAIT_S), self.num_inside

    def spoil(self, name: ChunkName) -> None:
        """Change a bit of a chunk."""
        meta, data, digest = self.chunks[name]
        self.chunks[name] = (meta, bytes([data[0] ^ 1]) + data[1:], digest)

    def write(self, meta: ChunkMeta, data: memoryview, digest: bytes = b"") -> None:
        # As from a file: the first half is read, then the call may be held up, then the rest.
        half = bytes(data[: len(data) // 2])
        self._enter("write", meta.name)
        whole = half + bytes(data[len(data) // 2 :])
        with self._changed:
            self.chunks.pop(meta.name, None)
            if sum(len(chunk) for _, chunk, _ in self.chunks.values()) + len(whole) > self.limit_bytes:
                raise TierFullError("no room")
            self.on_written(meta, whole)
            self.chunks[meta.name] = (meta, whole, digest or xxhash.xxh3_128_digest(whole))

    def read(self, meta: ChunkMeta, into: memoryview) -> bytes:
        self._enter("read", meta.name)
        found = self.chunks.get(meta.name)
        if found is None:
            raise ChunkMissingError("not there")
        there, data, digest = found
        into[: len(data)] = data[: len(into)]
        if there != meta or xxhash.xxh3_128_digest(data) != digest:
            raise ChunkCorruptError("spoilt")
        return digest

    def find(self, names: Sequence[ChunkName]) -> int:
        self._enter("find")
        return next((count for count, name in enumerate(names) if name not in self.chunks), len(names))

    def delete(self, names: Sequence[ChunkName]) -> None:
        self._enter("delete")
        for name in names:
            self.chunks.pop(name, None)

    def delete_namespace(self, namespace: bytes, on_page: Callable[[], None]) -> None:
        self._enter("delete")
        for name in [name for name in self.chunks if name.namespace == namespace]:
            del self.chunks[name]
            on_page()
            self._enter("page")

    def namespace_bytes(self, namespace: bytes, on_page: Callable[[], None]) -> int:
        self._enter("measure")
        on_page()
        chunks = list(self.chunks.items())
        return sum(HEADER_BYTES + len(data) for name, (_, data, _) in chunks if name.namespace == namespace)

    def scan(self) -> Iterator[Sequence[StoredChunk]]:
        self._enter("scan")
        for meta, _, _ in sorted(self.chunks.values(), key=lambda chunk: chunk[0].depth):
            yield [StoredChunk(meta, self.mtimes.get(meta.name, 0))]
            self._enter("scan")

    def free_bytes(self) -> int:
        self._enter("measure")
        return self.limit_bytes - sum(len(data) for _, data, _ in self.chunks.values())

    def close(self) -> None:
        assert not self.num_inside
        self.num_closed += 1

    def _enter(self, call: str, name: ChunkName | None = None) -> None:
        names: set[str | ChunkName] = {call} if name is None else {call, name}
        with self._changed:
            self.log.append(call)
            self.num_inside += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: not names & self.stopped, WAIT_S):
                    raise DeadlineError(f"{call} was stopped for {WAIT_S} s")
            finally:
                self.num_inside -= 1
            for error in (self.failures[each] for each in names & self.failures.keys()):
                raise error
