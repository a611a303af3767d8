"""PendingLookups: each is answered once, when its fetches or its time are over, or never, with its session."""

from __future__ import annotations

from kvferry.cache import Space
from kvferry.protocol.messages import Lookup
from kvferry.server.pending import MAX_KEY_BYTES, MAX_PENDING, PendingLookup, PendingLookups
from kvferry.server.session import Greeting, Session
from kvferry.server.tiers.fetches import Fetch


class Bench:
    """The lookups, and the seqs of those that were answered."""

    def __init__(self) -> None:
        self.answered: list[int] = []
        self.pending = PendingLookups(self._answer)

    def _answer(self, pending: PendingLookup) -> None:
        self.answered.append(pending.message.seq)

    def add(self, session: Session, seq: int, deadline: float, *fetches: Fetch, keys: bytes = b"") -> bool:
        return self.pending.add(session, Lookup(seq, "r", keys), dict(enumerate(fetches)), deadline)


def make_session(session_id: int = 1, tenant: str = "t") -> Session:
    return Session(session_id, tenant, Greeting(remote=False, begun_at=0.0))


def make_fetch() -> Fetch:
    return Fetch(Space("t", b"n" * 32), [b"k" * 32], 1)


def test_a_lookup_is_answered_when_all_its_fetches_have_ended() -> None:
    bench, session = Bench(), make_session()
    first, second = make_fetch(), make_fetch()
    assert bench.add(session, 1, 10.0, first, second)
    assert bench.add(session, 2, 10.0, first)
    first.end()
    assert bench.answered == [2]
    second.end()
    assert (bench.answered, len(bench.pending)) == ([2, 1], 0)
    bench.pending.tick(11.0)
    assert (bench.answered, bench.pending.next_deadline()) == ([2, 1], None)


def test_a_lookup_is_answered_when_its_time_is_over_and_not_again() -> None:
    bench, session, fetch = Bench(), make_session(), make_fetch()
    for seq, deadline in ((1, 3.0), (2, 1.0), (3, 2.0)):
        bench.add(session, seq, deadline, fetch)
    assert bench.pending.next_deadline() == 1.0
    bench.pending.tick(0.9)
    assert bench.answered == []
    bench.pending.tick(2.0)
    assert bench.answered == [2, 3]
    fetch.end()
    assert bench.answered == [2, 3, 1]


def test_a_session_that_ends_gets_no_answers_and_others_do() -> None:
    bench, fetch = Bench(), make_fetch()
    gone, other = make_session(1), make_session(2)
    bench.add(gone, 1, 1.0, fetch)
    bench.add(gone, 2, 5.0, fetch)
    bench.add(other, 3, 5.0, fetch)
    bench.pending.drop(gone)
    bench.pending.drop(gone)
    assert len(bench.pending) == 1
    bench.pending.tick(2.0)
    fetch.end()
    assert bench.answered == [3]


def test_so_many_of_a_session_wait_and_no_more() -> None:
    bench, fetch = Bench(), make_fetch()
    session, other = make_session(1), make_session(2)
    assert all(bench.add(session, seq, 5.0, fetch) for seq in range(MAX_PENDING))
    assert not bench.add(session, 5000, 5.0, fetch)
    assert bench.add(other, 6000, 5.0, fetch)
    fetch.end()
    assert bench.answered == [*range(MAX_PENDING), 6000]
    assert bench.add(session, 7000, 5.0, make_fetch())


def test_lookups_that_end_early_leave_nothing_behind() -> None:
    bench, session = Bench(), make_session()
    for seq in range(10_000):
        fetch = make_fetch()
        bench.add(session, seq, 60.0, fetch)
        fetch.end()
    assert len(bench.answered) == 10_000
    assert len(bench.pending._deadlines) < 200
    assert not bench.pending._sessions


def test_so_many_bytes_of_keys_wait_and_no_more() -> None:
    bench, keys = Bench(), bytes(MAX_KEY_BYTES // 4)
    sessions = [make_session(number, tenant) for number, tenant in enumerate("ttuuv")]
    assert [bench.add(session, 1, 5.0, make_fetch(), keys=keys) for session in sessions] == [True] * 4 + [False]
    bench.pending.drop(sessions[0])
    assert not bench.add(sessions[2], 2, 5.0, make_fetch(), keys=keys)  # its tenant has the half of all
    assert bench.add(sessions[4], 2, 5.0, make_fetch(), keys=keys)
    bench.pending.tick(6.0)
    assert all(bench.add(session, 3, 9.0, make_fetch(), keys=keys) for session in sessions[:4])
