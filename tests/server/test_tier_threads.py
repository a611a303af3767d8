"""TierThreads: every task is answered once, what is waited for comes first, and no call holds up the end for long."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from doubles.memory_tier import MemoryTier
from kvferry.cache.tiers import ChunkMeta, ChunkName
from kvferry.cache.tiers.format import HEADER_BYTES, digest_of
from kvferry.errors import (
    ChunkCorruptError,
    DeadlineError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from kvferry.server.tiers.tasks import (
    DeleteChunks,
    DeleteNamespace,
    FindChunks,
    MeasureNamespace,
    MeasureSpace,
    Outcome,
    ReadChunk,
    ScanTier,
    TierCompletion,
    TierDone,
    TierMoved,
    TierScanned,
    WriteChunk,
)
from kvferry.server.tiers.threads import TierThreads
from serving.process import eventually

SPACE = b"n" * 32
SIZE = 5000


def meta(key: int, depth: int = 1) -> ChunkMeta:
    parent = bytes([key - 1]) * 32 if depth > 1 else b""
    return ChunkMeta(ChunkName(SPACE, bytes([key]) * 32), parent, depth, SIZE, "t")


class Bench:
    """A tier, its threads, memory, and what they post."""

    def __init__(self, tier: MemoryTier) -> None:
        self.tier = tier
        self.memory = np.random.default_rng(7).integers(0, 256, 8 * SIZE, dtype=np.uint8)
        self.posted: queue.SimpleQueue[TierCompletion] = queue.SimpleQueue()
        self.threads = TierThreads(tier, memory_address=self.memory.ctypes.data, post=self.posted.put)
        self.threads.start()
        self.num_moved = 0

    def done(self) -> TierDone:
        item = self.posted.get(timeout=10)
        while isinstance(item, TierMoved):
            self.num_moved += 1
            item = self.posted.get(timeout=10)
        assert isinstance(item, TierDone)
        return item

    def scanned(self) -> TierScanned:
        item = self.posted.get(timeout=10)
        assert isinstance(item, TierScanned)
        return item


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(MemoryTier())
    yield made
    made.tier.let_go()
    made.threads.stop()


def test_a_chunk_goes_down_and_comes_up_again(bench: Bench) -> None:
    wanted = bench.memory[100 : 100 + SIZE].copy()
    bench.threads.submit(WriteChunk(1, meta(1), 100))
    assert bench.done() == TierDone("disk", 1)
    bench.threads.submit(ReadChunk(2, meta(1), 2 * SIZE))
    assert bench.done() == TierDone("disk", 2, digest=digest_of(wanted.data))
    assert np.array_equal(bench.memory[2 * SIZE : 3 * SIZE], wanted)
    bench.threads.submit(FindChunks(3, (meta(1).name, meta(2).name)))
    assert bench.done().value == 1
    bench.threads.submit(MeasureSpace(4))
    measured = bench.done()
    assert (measured.value, measured.num_opened) == (bench.tier.limit_bytes - SIZE, 1)
    bench.threads.submit(DeleteChunks(5, (meta(1).name, meta(2).name)))
    assert bench.done().outcome is Outcome.DONE
    bench.threads.submit(ReadChunk(6, meta(1), 0))
    assert bench.done().outcome is Outcome.MISSING
    bench.threads.submit(WriteChunk(7, meta(1), 0))
    bench.done()
    bench.threads.submit(MeasureNamespace(8, SPACE))
    assert bench.done().value == SIZE + HEADER_BYTES
    bench.threads.submit(DeleteNamespace(9, SPACE))
    assert bench.done().outcome is Outcome.DONE
    assert not bench.tier.chunks


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (TierFullError("x"), Outcome.FULL),
        (TierUnavailableError("x"), Outcome.UNAVAILABLE),
        (ChunkCorruptError("x"), Outcome.CORRUPT),
        (TierError("x"), Outcome.FAILED),
        (ZeroDivisionError("x"), Outcome.FAILED),
    ],
)
def test_what_a_call_raises_is_an_answer_and_the_thread_goes_on(
    bench: Bench, error: TierError, outcome: Outcome
) -> None:
    bench.tier.failures["write"] = error
    for number in range(2 * bench.tier.num_threads):
        bench.threads.submit(WriteChunk(number, meta(1), 0))
        done = bench.done()
        assert (done.task_id, done.outcome) == (number, outcome)
        assert "x" in done.text
    bench.tier.failures.clear()
    bench.threads.submit(WriteChunk(99, meta(1), 0))
    assert bench.done() == TierDone("disk", 99)


def test_reads_come_before_writes_that_wait_longer() -> None:
    bench = Bench(MemoryTier(num_threads=1))
    bench.tier.stop("write")
    bench.threads.submit(WriteChunk(1, meta(1), 0))
    bench.tier.wait_inside(1)
    for number in (2, 3):
        bench.threads.submit(WriteChunk(number, meta(number), 0))
    bench.threads.submit(ScanTier())
    bench.threads.submit(DeleteChunks(4, (meta(9).name,)))
    bench.threads.submit(ReadChunk(5, meta(1), SIZE))
    bench.tier.let_go()
    found = [bench.posted.get(timeout=10) for _ in range(7)]
    order = [item.task_id if isinstance(item, TierDone) else "scan" for item in found]
    assert order == [1, 5, 4, "scan", "scan", 2, 3]
    bench.threads.stop()


def test_a_scan_comes_in_parts_and_says_when_it_has_ended(bench: Bench) -> None:
    for key in (1, 2, 3):
        bench.threads.submit(WriteChunk(key, meta(key, depth=key), 0))
        bench.done()
    bench.threads.submit(ScanTier())
    parts = [bench.scanned() for _ in range(4)]
    assert [chunk.meta for part in parts for chunk in part.chunks] == [meta(key, depth=key) for key in (1, 2, 3)]
    assert [part.ended for part in parts] == [False, False, False, True]


def test_a_scan_that_fails_has_ended_and_says_why(bench: Bench) -> None:
    bench.tier.failures["scan"] = TierUnavailableError("gone")
    bench.threads.submit(ScanTier())
    assert bench.scanned() == TierScanned("disk", (), True, "gone")


def test_what_was_withdrawn_is_not_done(bench: Bench) -> None:
    bench.tier.stop("write")
    for key in (1, 2, 3, 4):
        bench.threads.submit(WriteChunk(key, meta(key), 0))
    bench.threads.submit(DeleteChunks(5, ()))
    bench.tier.wait_inside(2)
    assert bench.threads.withdraw((WriteChunk,)) == [WriteChunk(3, meta(3), 0), WriteChunk(4, meta(4), 0)]
    bench.tier.let_go()
    assert {bench.done().task_id for _ in range(3)} == {1, 2, 5}
    assert set(bench.tier.chunks) == {meta(1).name, meta(2).name}


def test_stop_drops_what_waits_and_waits_for_what_runs() -> None:
    bench = Bench(MemoryTier())
    bench.tier.stop("write")
    for key in (1, 2, 3):
        bench.threads.submit(WriteChunk(key, meta(key), 0))
    bench.tier.wait_inside(2)
    with pytest.raises(DeadlineError, match="kvferry-disk-0 did not end within"):
        bench.threads.stop(0.01)
    assert bench.tier.num_closed == 0
    bench.tier.let_go()
    bench.threads.stop()
    bench.threads.stop()
    assert bench.tier.num_closed > 0
    assert set(bench.tier.chunks) == {meta(1).name, meta(2).name}


def test_a_thread_that_hangs_shows_in_its_pulse(bench: Bench) -> None:
    bench.tier.stop("read")
    bench.threads.submit(ReadChunk(1, meta(1), 0))
    bench.tier.wait_inside(1)
    texts = [repr(pulse) for pulse in bench.threads.pulses]
    assert sum("ReadChunk of the disk tier" in text for text in texts) == 1, texts


class Paged(MemoryTier):
    """Deletes a namespace in pages, each when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: queue.SimpleQueue[None] = queue.SimpleQueue()

    def delete_namespace(self, namespace: bytes, on_page: Callable[[], None]) -> None:
        while self.chunks:
            self.pages.get(timeout=20)
            self.chunks.popitem()
            on_page()


def test_a_deletion_of_many_pages_moves_with_each_and_does_not_hold_up_the_end() -> None:
    """U6: a bucket that is slow, but answers, is no thread that hangs."""
    tier = Paged()
    bench = Bench(tier)
    for key in range(1, 5):
        bench.threads.submit(WriteChunk(key, meta(key), 0))
        bench.done()
    bench.threads.submit(DeleteNamespace(5, SPACE))
    eventually(lambda: any("DeleteNamespace" in repr(pulse) for pulse in bench.threads.pulses))
    (pulse,) = [pulse for pulse in bench.threads.pulses if "DeleteNamespace" in repr(pulse)]
    for _ in range(2):
        then = time.monotonic()
        assert pulse.stalled(then + 5, 5) is not None
        tier.pages.put(None)
        assert bench.posted.get(timeout=10) == TierMoved("disk")
        assert pulse.stalled(then + 5, 5) is None
        assert "DeleteNamespace of the disk tier" in repr(pulse)
    with pytest.raises(DeadlineError):
        bench.threads.stop(0.01)
    tier.pages.put(None)
    bench.threads.stop()
    assert bench.posted.get(timeout=10) == TierDone("disk", 5, Outcome.UNAVAILABLE, "the server ends")
    assert len(tier.chunks) == 1
