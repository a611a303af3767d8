"""What only lower tiers have comes into memory: its leading part, whole and checked, whatever goes wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import pytest

from doubles.memory_tier import MemoryTier
from kvferry.cache import Space
from kvferry.errors import TierUnavailableError
from kvferry.server.tiers import fetches as tier_fetches
from tier_bench import CHUNK, SPACE, TierBench, keys, name

Make = Callable[..., TierBench]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes benches, of which all that was stored is in the lower tiers only, and closes them."""
    made: list[TierBench] = []

    def make_one(*prompts: str, num_chunks: int = 8, **arguments: object) -> TierBench:
        bench = TierBench(num_chunks, **arguments)  # type: ignore[arg-type]
        made.append(bench)
        bench.settle()
        for prompt in prompts:
            bench.store(prompt)
            bench.settle()
        bench.forget_memory()
        assert not len(bench.index)
        return bench

    yield make_one
    for bench in made:
        bench.close()


def disk_of(bench: TierBench) -> MemoryTier:
    assert bench.disk is not None
    return bench.disk


def remote_of(bench: TierBench) -> MemoryTier:
    assert bench.remote is not None
    return bench.remote


def test_a_chain_comes_back_from_disk(make: Make) -> None:
    bench = make("abc", disk=MemoryTier())
    fetch = bench.fetch("abcd")
    assert fetch is not None
    assert fetch.coming == 3
    assert bench.have("abcd") == 0
    assert bench.load("abcd") == 3
    assert fetch.coming == 0
    assert bench.fetch("abcd") is None
    assert bench.values()["disk_chunks_read"] == 3
    assert not bench.index.dirty


def test_what_memory_has_is_not_read_again(make: Make) -> None:
    bench = make("abcd", disk=MemoryTier())
    bench.load("ab")
    disk_of(bench).log.clear()
    assert bench.load("abcd") == 4
    assert disk_of(bench).log.count("read") == 2


@pytest.mark.parametrize("damage", ["corrupt", "missing"])
def test_what_is_damaged_is_a_miss_and_is_counted_and_the_rest_comes(make: Make, damage: str) -> None:
    bench = make("abcd", "xyz", disk=MemoryTier())
    if damage == "corrupt":
        disk_of(bench).spoil(name("abc"))
    else:
        del disk_of(bench).chunks[name("abc")]
    assert bench.load("abcd") == 2
    bench.settle()
    assert bench.values()[f"disk_{damage}"] == 1
    assert name("abc") not in disk_of(bench).chunks
    assert bench.load("xyz") == 3
    assert bench.load("abcd") == 2
    assert bench.pool.used_bytes == 5 * CHUNK
    bench.store("abcd")  # and what is stored again is there again
    bench.settle()
    bench.forget_memory()
    assert bench.load("abcd") == 4


def test_a_disk_that_cannot_be_reached_is_a_miss_and_keeps_what_it_has(make: Make) -> None:
    bench = make("abcd", disk=MemoryTier())
    disk_of(bench).failures["read"] = TierUnavailableError("the disk is gone")
    assert bench.load("abcd") == 0
    assert bench.values()["disk_reads_failed"] == 4
    assert bench.values()["disk_paused"] == 1
    assert bench.fetch("abcd") is None
    disk_of(bench).failures.clear()
    bench.tick(11)
    assert bench.load("abcd") == 4


def test_as_much_comes_as_there_is_room_for(make: Make) -> None:
    bench = make("ab", "abc", "abcd", "abcde", num_chunks=5, disk=MemoryTier())
    small = make(num_chunks=3, disk=disk_of(bench))
    assert small.load("abcde") == 3
    assert small.load("abcde") == 3  # and nothing is stuck
    assert small.store("x") == 1


def test_two_that_want_the_same_chain_wait_for_the_same_reads(make: Make) -> None:
    bench = make("abcx", "abcy", num_chunks=16, disk=MemoryTier())
    disk_of(bench).stop("read")
    first, second = bench.fetch("abcx"), bench.fetch("abcy")
    assert first is not None
    assert second is not None
    assert bench.fetch("abcx") is first
    assert (first.coming, second.coming) == (4, 4)
    disk_of(bench).let_go()
    ended: list[str] = []
    first.on_end(lambda: ended.append("first"))
    second.on_end(lambda: ended.append("second"))
    bench.settle()
    assert sorted(ended) == ["first", "second"]
    assert (bench.check("abcx"), bench.check("abcy")) == (4, 4)
    assert disk_of(bench).log.count("read") == 5
    late: list[bool] = []
    first.on_end(lambda: late.append(True))
    assert late == [True]


def test_a_load_leaves_memory_to_stores(make: Make) -> None:
    bench = make("abcd", "wxyz", num_chunks=8, disk=MemoryTier())
    disk_of(bench).stop("read")
    bench.fetch("abcd")
    bench.fetch("wxyz")
    assert bench.values()["disk_queue"] == 4  # the half of memory is loading, so the second one waits for its turn
    assert bench.store("pqr") == 3
    disk_of(bench).let_go()
    bench.settle()
    assert bench.load("wxyz") == 4


def test_a_chunk_being_read_is_not_deleted_for_another(make: Make) -> None:
    bench = make("ab", disk=MemoryTier(), disk_bytes=2 * 8192)
    disk_of(bench).stop("read")
    bench.fetch("ab")
    disk_of(bench).wait_inside(2)
    bench.store("x")
    bench.until(lambda: bench.values()["disk_queue"] == 2)
    assert bench.values()["disk_writes_skipped"] == 1
    disk_of(bench).let_go()
    bench.settle()
    assert bench.check("ab") == 2


def test_what_is_cleared_while_it_is_loaded_does_not_come(make: Make) -> None:
    bench = make("abc", disk=MemoryTier())
    disk_of(bench).stop("read")
    fetch = bench.fetch("abc")
    assert fetch is not None
    root = bench.index.find(SPACE, keys("a")[0])
    assert root is not None
    bench.index.discard(root)
    bench.tiers.clear(SPACE)
    assert bench.fetch("abc") is None or fetch.coming
    disk_of(bench).let_go()
    bench.settle()
    assert bench.have("abc") == 0
    assert bench.pool.used_bytes == 0
    assert not disk_of(bench).chunks
    assert bench.load("abc") == 0


def test_a_second_server_finds_what_the_first_put_into_the_remote_tier(make: Make) -> None:
    shared = MemoryTier("remote")
    make("abc", num_chunks=16, remote=shared)
    other = make(num_chunks=16, disk=MemoryTier(), remote=MemoryTier("remote"))
    remote_of(other).chunks = shared.chunks
    fetch = other.fetch("abcd")
    assert fetch is not None
    assert fetch.coming == 4  # it is not known yet how many there are
    assert other.load("abcd") == 3
    other.settle()
    assert list(disk_of(other).chunks) == [name("a"), name("ab"), name("abc")]  # nearer now
    assert remote_of(other).log.count("write") == 0  # it is there already
    other.store("abcd")
    other.settle()
    assert remote_of(other).log.count("write") == 1


def test_a_chain_comes_from_disk_as_far_as_that_has_it_and_then_from_the_remote_tier(make: Make) -> None:
    bench = make("abcd", num_chunks=16, disk=MemoryTier(), remote=MemoryTier("remote"))
    bench.tiers._disk.clear(SPACE, keys("abc")[-1], lambda text: None)  # type: ignore[union-attr]
    bench.settle()
    assert bench.load("abcd") == 4
    assert bench.values()["disk_chunks_read"] == 2
    assert bench.values()["remote_chunks_read"] == 2


def test_what_the_remote_tier_lacks_is_not_asked_for_again_at_once(make: Make) -> None:
    bench = make(remote=MemoryTier("remote"))
    for _ in range(5):
        assert bench.load("abc") == 0
    assert remote_of(bench).log.count("find") == 1
    bench.tick(6)
    assert bench.load("abc") == 0
    assert remote_of(bench).log.count("find") == 2
    bench.store("abc")
    bench.settle()
    bench.store("abcd")
    bench.settle()
    bench.forget_memory()
    assert bench.load("abcd") == 4  # written here since


@pytest.mark.parametrize("lie", ["more", "less", "spoilt", "unavailable"])
def test_a_remote_tier_that_lies_gives_a_miss(make: Make, lie: str) -> None:
    bench = make("abc", num_chunks=16, remote=MemoryTier("remote"))
    remote = remote_of(bench)
    if lie == "more":
        remote.find = lambda names: 1 << 40  # type: ignore[method-assign]
    elif lie == "less":
        remote.find = lambda names: -5  # type: ignore[method-assign]
    elif lie == "spoilt":
        remote.spoil(name("ab"))
    else:
        remote.failures["find"] = TierUnavailableError("no answer")
    assert bench.load("abcde") == {"more": 3, "less": 0, "spoilt": 1, "unavailable": 0}[lie]
    assert bench.store("abcde") == 5
    bench.settle()
    assert bench.pool.used_bytes == 5 * CHUNK


def test_what_the_remote_tier_lost_is_written_there_again(make: Make) -> None:
    bench = make("abc", num_chunks=16, remote=MemoryTier("remote"))
    del remote_of(bench).chunks[name("ab")]
    assert bench.load("abc") == 1
    bench.store("abc")
    bench.settle()
    assert set(remote_of(bench).chunks) == {name("a"), name("ab"), name("abc")}


def test_clear_reaches_the_remote_tier_and_is_true_at_once(make: Make) -> None:
    bench = make("abc", "xyz", num_chunks=16, remote=MemoryTier("remote"))
    remote = remote_of(bench)
    remote.stop("delete")
    bench.tiers.clear(SPACE, keys("abc"), 1)
    assert bench.fetch("abc") is None  # what hangs from it is not known, so that all of the space goes
    assert bench.fetch("xyz") is None
    assert set(remote.chunks) == {name(prompt) for prompt in ("a", "ab", "abc", "x", "xy", "xyz")}
    remote.let_go()
    bench.settle()
    assert not remote.chunks
    assert bench.load("abc") == 0


def test_a_clear_that_fails_holds_here_and_is_tried_again(make: Make) -> None:
    bench = make("abc", num_chunks=16, remote=MemoryTier("remote"))
    remote = remote_of(bench)
    remote.failures["delete"] = TierUnavailableError("no answer")
    bench.tiers.clear(SPACE, keys("abc"), 0)
    bench.settle()
    assert bench.fetch("abc") is None
    remote.failures.clear()
    bench.tick(1)
    bench.settle()
    assert not remote.chunks
    assert bench.values()["remote_deleting"] == 0


def test_what_is_stored_below_a_chain_that_is_being_loaded_goes_down_too(make: Make) -> None:
    bench = make("ab", disk=MemoryTier(num_threads=1))
    disk_of(bench).stop("read")
    assert bench.fetch("ab") is not None
    assert bench.store("abc") == 1  # the first two are on their way
    assert bench.have("abc") == 0
    disk_of(bench).let_go()
    bench.settle()
    assert bench.check("abc") == 3
    assert not bench.index.dirty
    assert name("abc") in disk_of(bench).chunks


def test_a_chunk_keeps_its_checksum_on_its_way_down_and_up(make: Make) -> None:
    bench = make(disk=MemoryTier())
    reservation = bench.index.reserve(SPACE, keys("ab"), CHUNK)
    for chunk, digest in zip(reservation.chunks, (b"", b"not that of these bytes"), strict=True):
        chunk.digest = digest  # the second one was damaged after that was taken
    bench.tiers.on_stored(bench.index.commit(reservation.chunks, dirty=True))
    bench.settle()
    bench.forget_memory()
    fetch = bench.fetch("ab")
    assert fetch is not None
    bench.until(lambda: not fetch.coming)
    (loaded,) = bench.chunks("ab")
    assert loaded.digest == disk_of(bench).chunks[name("a")][2]
    assert bench.values()["disk_corrupt"] == 1


class CountedKeys(Sequence[bytes]):
    """A long chain of keys, which counts how many were asked for."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self._count = count
        self._seed = seed
        self.num_made = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> bytes:  # type: ignore[override]
        self.num_made += 1
        return hashlib.sha256(b"%d %d" % (self._seed, place)).digest()


def test_of_a_long_chain_that_is_known_to_be_missing_few_keys_are_looked_at(make: Make) -> None:
    bench = make(remote=MemoryTier("remote"))
    chain = CountedKeys(32_768)
    fetch = bench.tiers.fetch(SPACE, chain, 0, CHUNK)
    assert fetch is not None
    assert fetch.coming == 32_768
    assert chain.num_made < 2 * tier_fetches.FIND_CHUNKS
    bench.until(lambda: not fetch.coming)
    chain.num_made = 0
    assert bench.tiers.fetch(SPACE, chain, 0, CHUNK) is None
    assert chain.num_made < 20


def test_a_chain_longer_than_one_question_comes_whole(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_fetches, "FIND_CHUNKS", 2)
    bench = make("abcdefg", num_chunks=32, remote=MemoryTier("remote"))
    fetch = bench.fetch("abcdefghi")
    assert fetch is not None
    assert fetch.coming == 9  # at most
    assert bench.load("abcdefghi") == 7
    assert remote_of(bench).log.count("find") == 4
    assert fetch.coming == 0
    small = make(num_chunks=3, remote=remote_of(bench))
    assert small.load("abcdefg") == 3  # and no more is asked for than there is room for
    assert remote_of(bench).log.count("find") == 6


def test_what_is_loaded_is_limited_by_its_keys_for_one_tenant_and_for_all(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_fetches, "MAX_KEY_BYTES", 4 * 100 * 32)
    bench = make(remote=MemoryTier("remote"))
    remote_of(bench).stop("find")
    other = Space("other", b"o" * 32)

    def begins(space: Space, seed: int) -> bool:
        return bench.tiers.fetch(space, CountedKeys(100, seed), 0, CHUNK) is not None

    assert [begins(SPACE, seed) for seed in range(4)] == [True, True, False, False]
    assert [begins(other, seed) for seed in range(4)] == [True, True, False, False]
    assert not begins(Space("third", b"3" * 32), 0)
    remote_of(bench).let_go()
    bench.settle()
    assert begins(SPACE, 5)
    bench.settle()
