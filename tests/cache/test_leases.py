"""LeaseTable: a release undoes its own pins and no others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pytest

from kvferry.cache import Chunk, ChunkIndex, Lease, LeaseTable, SlabPool, Space, leases

CHUNK = 65536
RANKS = (Space("t", b"0" * 32), Space("t", b"1" * 32))
KEYS = [bytes([i]) * 32 for i in range(4)]
TTL_S = 60.0


def make_table() -> tuple[ChunkIndex, LeaseTable]:
    """Four chunks for each of two ranks in a pool of eight."""
    pool = SlabPool()
    pool.add_area(0, 8 * CHUNK)
    index = ChunkIndex(pool)
    for space in RANKS:
        index.commit(index.reserve(space, KEYS, CHUNK).chunks)
    return index, LeaseTable(index, TTL_S)


def last(index: ChunkIndex, space: Space, count: int = 4) -> Chunk:
    found = index.lookup(space, KEYS[:count])
    assert found is not None
    return found


def shares(index: ChunkIndex, count: int = 4) -> dict[int, Chunk]:
    return {rank: last(index, space, count) for rank, space in enumerate(RANKS)}


def pins(index: ChunkIndex) -> list[int]:
    """The pins on each rank's chain."""
    return [last(index, space).pins for space in RANKS]


def grant(index: ChunkIndex, table: LeaseTable, request: str, count: int = 4, now: float = 0.0) -> int:
    lease = table.grant("s", request, scope="e", shares=shares(index, count), now=now)
    assert lease is not None
    return lease.lease_id


def test_release_never_lowers_what_another_request_holds() -> None:
    index, table = make_table()
    first, second = grant(index, table, "r1"), grant(index, table, "r2")
    assert grant(index, table, "r1") == first
    assert pins(index) == [2, 2]
    assert table.release(first)
    assert not table.release(first)
    assert not table.release(first)
    assert pins(index) == [1, 1]
    assert not any(index.evict_one() for _ in range(8))
    table.release(second)
    assert pins(index) == [0, 0]


def test_a_longer_promise_replaces_the_requests_own_lease() -> None:
    index, table = make_table()
    short = grant(index, table, "r1", 2)
    long = grant(index, table, "r1", 4)
    assert short != long
    assert table.get(short) is None
    assert pins(index) == [1, 1]


def test_a_share_is_taken_once_and_the_last_ends_the_lease() -> None:
    index, table = make_table()
    lease = grant(index, table, "r1")
    table.take(lease, 0)
    table.take(lease, 0)
    assert pins(index) == [0, 1]
    table.take(lease, 1)
    assert table.get(lease) is None
    assert pins(index) == [0, 0]
    assert grant(index, table, "r1") != lease


def test_a_request_that_asks_again_gets_whole_promises_and_spoils_none() -> None:
    index, table = make_table()
    first = grant(index, table, "r1")
    table.take(first, 0)
    second = grant(index, table, "r1")
    assert second != first
    table.take(first, 1)  # the rank that was slower
    again = table.get(second)
    assert again is not None
    assert set(again.shares) == {0, 1}
    assert table.get(first) is None
    table.release(second)
    assert pins(index) == [0, 0]


def test_leases_expire_in_order_and_a_repeated_lookup_renews() -> None:
    index, table = make_table()
    grant(index, table, "old", now=0)
    grant(index, table, "renewed", now=10)
    grant(index, table, "renewed", now=50)
    grant(index, table, "young", now=60)
    assert table.expire(TTL_S - 1) == 0
    assert table.expire(TTL_S) == 1
    assert table.next_expiry() == 110
    assert table.expire(1000) == 2
    assert table.next_expiry() is None
    assert table.num_expired == 3
    assert pins(index) == [0, 0]


def test_a_session_takes_its_leases_with_it() -> None:
    index, table = make_table()
    grant(index, table, "r1")
    table.grant("other", "r1", scope="e", shares=shares(index), now=0)
    assert table.release_owner("s") == 1
    assert pins(index) == [1, 1]
    assert len(table) == 1


def test_a_session_has_so_many_leases_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_LEASES", 3)
    index, table = make_table()
    first, *_ = (grant(index, table, request) for request in ("a", "b", "c"))
    assert table.grant("s", "d", scope="e", shares=shares(index), now=0) is None
    assert pins(index) == [3, 3]
    assert table.grant("other", "d", scope="e", shares=shares(index), now=0) is not None
    assert grant(index, table, "a") == first  # as it is
    assert grant(index, table, "a", 2) != first  # in its place
    table.expire(TTL_S)
    assert (len(table), grant(index, table, "d") > 0) == (0, True)


class _Unread(OrderedDict[int, Lease]):
    """Nobody may go through all of it."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError

    values = items = __iter__  # type: ignore[assignment]


def test_the_end_of_a_session_looks_at_its_own_leases_only() -> None:
    index, table = make_table()
    share = shares(index, 1)
    for number in range(20_000):
        table.grant(number % 2000, str(number), scope="e", shares=share, now=0)
    table._leases = _Unread(table._leases)
    assert sum(table.release_owner(owner) for owner in range(2000)) == 20_000
    assert (len(table), table._owned, pins(index)) == (0, {}, [0, 0])


def test_a_cut_promise_is_shorter_for_every_rank() -> None:
    index, table = make_table()
    lease_id = grant(index, table, "r1")
    table.cut(lease_id, 2)
    table.cut(lease_id, 3)  # it is shorter already
    lease = table.get(lease_id)
    assert lease is not None
    assert (lease.num_promised, lease.num_chunks) == (4, 2)
    assert [share.depth for share in lease.shares.values() if share is not None] == [2, 2]
    assert pins(index) == [0, 0]
    assert [last(index, space, 2).pins for space in RANKS] == [1, 1]
    table.take(lease_id, 0)
    table.cut(lease_id, 0)
    assert lease.shares == {1: None}
    table.release(lease_id)
    assert [index.evict_one() for _ in range(9)] == [True] * 8 + [False]


def test_a_lost_chunk_cuts_all_its_promises_and_gives_its_place_back() -> None:
    index, table = make_table()
    long, short = grant(index, table, "r1"), grant(index, table, "r2", 2)
    lost = last(index, RANKS[1], 3)
    assert index.discard(lost) == 2
    assert len(index) == 6
    assert table.lose(lost) == 1
    found = [table.get(lease_id) for lease_id in (long, short)]
    assert [lease.num_chunks for lease in found if lease is not None] == [2, 2]
    assert [lease.num_promised for lease in found if lease is not None] == [4, 2]
    assert last(index, RANKS[0], 2).pins == 2
    assert table.lose(lost) == 0
    table.release(long)
    table.release(short)
    fresh = index.reserve(RANKS[1], KEYS, CHUNK)
    assert (fresh.first, len(fresh.chunks)) == (2, 2)  # in what the lost ones had, so nothing else had to go
    assert index.counters.evicted == 0


def test_a_promise_of_what_was_forgotten_can_be_cut_still() -> None:
    index, table = make_table()
    lease = grant(index, table, "r1")
    for space in RANKS:
        root = index.find(space, KEYS[0])
        assert root is not None
        index.discard(root)
    table.cut(lease, 1)
    skipped = [index.reserve(space, KEYS, CHUNK).num_skipped for space in RANKS]
    assert skipped == [0, 2]  # six slots are free, and one is held for each rank
    table.release(lease)
    assert index.reserve(RANKS[1], KEYS, CHUNK).num_skipped == 0


def test_a_request_whose_promise_was_cut_gets_a_new_one() -> None:
    index, table = make_table()
    first = grant(index, table, "r1")
    table.cut(first, 2)
    second = grant(index, table, "r1", 2)
    assert second != first
    assert table.get(first) is None
