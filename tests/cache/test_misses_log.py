"""MissLog: what became of chunks is remembered within bounds; what the index notes in it."""

from __future__ import annotations

from kvferry.cache import BytePool, ChunkIndex, Miss, MissLog, Quotas, Space

SPACE = Space("t", b"s" * 32)
KEYS = [bytes([number]) * 32 for number in range(8)]


def make_index(capacity: int, **limits: int) -> tuple[ChunkIndex, MissLog]:
    log = MissLog()
    return ChunkIndex(BytePool(capacity), quotas=Quotas(limits), misses=log), log


def test_the_oldest_notes_are_forgotten() -> None:
    log = MissLog(max_notes=3)
    for key in (KEYS[0], KEYS[1], KEYS[2], KEYS[0], KEYS[3]):
        log.note(SPACE, key, Miss.EVICTED)
    assert [log.reason(SPACE, key) for key in KEYS[:4]] == [Miss.EVICTED, None, Miss.EVICTED, Miss.EVICTED]
    log.forget(SPACE, KEYS[0])
    log.forget(SPACE, KEYS[0])
    assert log.reason(SPACE, KEYS[0]) is None
    MissLog(0).note(SPACE, KEYS[0], Miss.EVICTED)


def test_every_reason_has_a_counter_from_the_start() -> None:
    log = MissLog()
    log.count(Miss.TIMED_OUT)
    assert log.values() == {f"misses_{reason.value}": float(reason is Miss.TIMED_OUT) for reason in Miss}


def test_the_index_notes_what_became_of_a_chunk_and_forgets_it_when_the_chunk_comes_back() -> None:
    index, log = make_index(2)
    index.commit(index.reserve(SPACE, KEYS[:2], 1).chunks)
    index.evict_one()
    assert log.reason(SPACE, KEYS[1]) is Miss.EVICTED
    again = index.reserve(SPACE, KEYS[:4], 1).chunks
    assert [log.reason(SPACE, key) for key in KEYS[1:4]] == [None, Miss.DROPPED, None]
    index.abort(again)
    assert log.reason(SPACE, KEYS[1]) is Miss.FAILED
    root = index.find(SPACE, KEYS[0])
    assert root is not None
    index.discard(root, Miss.INTEGRITY)
    assert log.reason(SPACE, KEYS[0]) is Miss.INTEGRITY
    (fresh,) = index.reserve(SPACE, KEYS[:1], 1).chunks
    index.discard(fresh)  # as somebody asked for: nothing to explain
    assert log.reason(SPACE, KEYS[0]) is None


def test_a_store_over_its_quota_or_share_was_dropped() -> None:
    index, log = make_index(9, t=1)
    index.reserve(SPACE, KEYS[:2], 1)
    assert log.reason(SPACE, KEYS[1]) is Miss.DROPPED
    index, log = make_index(9)
    index.reserve(SPACE, KEYS[:3], 1, limit=2)
    assert log.reason(SPACE, KEYS[2]) is Miss.DROPPED


def test_a_chunk_of_the_same_tenant_may_be_elsewhere() -> None:
    index, _ = make_index(9)
    own, other, foreign = (Space(tenant, bytes([number]) * 32) for number, tenant in enumerate("ttu"))
    index.reserve(own, KEYS[:1], 1)
    index.reserve(foreign, KEYS[:2], 1)
    assert not index.is_elsewhere(KEYS[0], [own])
    assert index.is_elsewhere(KEYS[0], [other])
    assert not index.is_elsewhere(KEYS[0], [own, other])
    assert not index.is_elsewhere(KEYS[1], [own, other])
