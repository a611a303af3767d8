"""Keys that do not begin at a chain's root: found, added to, promised and lost all the same."""

from __future__ import annotations

from kvferry.cache import ChunkIndex, LeaseTable, SlabPool, Space

CHUNK = 65536
SPACE = Space("t", b"0" * 32)
KEYS = [bytes([i]) * 32 for i in range(6)]


def make_index(*, stored: int = 4, slots: int = 8) -> ChunkIndex:
    pool = SlabPool()
    pool.add_area(0, slots * CHUNK)
    index = ChunkIndex(pool)
    index.commit(index.reserve(SPACE, KEYS[:stored], CHUNK).chunks)
    return index


def grant(index: ChunkIndex, table: LeaseTable, request: str = "r") -> int:
    """A lease on chunks 2 and 3 alone."""
    last = index.lookup(SPACE, KEYS[2:], before=2)
    assert last is not None
    lease = table.grant("s", request, scope="e", shares={0: last}, now=0.0, before=2)
    assert lease is not None
    return lease.lease_id


def test_a_lookup_goes_on_where_it_is_said_to() -> None:
    index = make_index()
    found = index.lookup(SPACE, KEYS[2:], before=2)
    assert found is not None
    assert (found.key, found.depth) == (KEYS[3], 4)
    assert index.lookup(SPACE, KEYS[2:]) is None
    assert index.lookup(SPACE, KEYS[2:], before=1) is None


def test_a_store_adds_to_a_chain_below_any_of_its_chunks() -> None:
    index = make_index()
    reservation = index.reserve(SPACE, KEYS[3:], CHUNK, 1)
    index.commit(reservation.chunks)
    assert [chunk.depth for chunk in reservation.chunks] == [5, 6]
    assert (reservation.num_present, reservation.num_stored, reservation.num_skipped) == (0, 2, 0)
    found = index.lookup(SPACE, KEYS)
    assert found is not None
    assert found.depth == 6


def test_a_store_below_what_is_not_there_finds_no_place() -> None:
    index = make_index(stored=2)
    reservation = index.reserve(SPACE, KEYS[3:], CHUNK, 1)
    assert (reservation.chunks, reservation.num_skipped) == ((), 2)


def test_only_the_first_key_may_hang_from_another() -> None:
    index = make_index()
    reservation = index.reserve(SPACE, [KEYS[0], KEYS[2]], CHUNK)
    assert (reservation.num_present, reservation.num_skipped, len(reservation.chunks)) == (1, 1, 0)


def test_a_lease_promises_what_comes_after_and_keeps_all() -> None:
    index = make_index()
    table = LeaseTable(index, 60.0)
    lease = table.get(grant(index, table))
    assert lease is not None
    assert (lease.num_promised, lease.before) == (2, 2)
    assert not any(index.evict_one() for _ in range(4))
    table.release(lease.lease_id)
    assert all(index.evict_one() for _ in range(4))


def test_the_same_end_after_another_beginning_is_another_promise() -> None:
    index = make_index()
    table = LeaseTable(index, 60.0)
    tail = grant(index, table)
    last = index.lookup(SPACE, KEYS)
    assert last is not None
    whole = table.grant("s", "r", scope="e", shares={0: last}, now=0.0)
    assert whole is not None
    assert (whole.lease_id == tail, whole.num_promised) == (False, 4)
    assert grant(index, table, "other") == grant(index, table, "other")


def test_what_is_lost_cuts_the_promise_by_its_place_in_it() -> None:
    for place, left in ((3, 1), (2, 0), (0, 0)):
        index = make_index()
        table = LeaseTable(index, 60.0)
        lease = table.get(grant(index, table))
        lost = index.find(SPACE, KEYS[place])
        assert lease is not None
        assert lost is not None
        index.discard(lost)
        assert table.lose(lost) == 1
        assert lease.num_chunks == left
        share = lease.shares[0]
        assert (None if share is None else share.depth) == (3 if left else None)
        table.release(lease.lease_id)
