"""The receiving side of transfers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from kvferry.errors import TransferError
from kvferry.p2p.signal.messages import Accept, End, Landed, NoSuch, Offer, Ready, Stopped, Withdraw
from kvferry.p2p.transfers.incoming_records import Claim, Incoming, InKey, ReceiverEffects, State
from kvferry.p2p.transfers.memory import EndedIds, Ending, Remembered
from kvferry.p2p.transfers.outgoing import copy_of
from kvferry.p2p.transfers.outgoing_records import Session
from kvferry.p2p.transfers.unclaimed import Unclaimed


class IncomingTable:
    """All transfers that this engine receives, and all claims. For the loop's thread."""

    def __init__(self, effects: ReceiverEffects, *, remember_s: float) -> None:
        self._effects = effects
        self._remember_s = remember_s
        self._by_key: dict[InKey, Incoming] = {}
        self._by_number: dict[tuple[Session, int], Incoming] = {}
        self._claims: dict[InKey, Claim] = {}
        self._ended: EndedIds[InKey] = EndedIds()
        self._unclaimed = Unclaimed()
        self.refused: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_unclaimed(self) -> int:
        """Transfers that nobody has claimed."""
        return self._unclaimed.total

    def claim(self, claim: Claim, now: float) -> None:
        """Wait for, or take, what comes under an id. Raises TransferError where it is claimed already, or has ended."""
        if claim.key in self._claims:
            raise TransferError("duplicate", f"transfer {claim.key.transfer_id!r} is claimed already")
        ended = self._ended.find(claim.key, now)
        self._ended.forget(claim.key)
        found = self._by_key.get(claim.key)
        if ended is not None and ended.ending is Ending.DROPPED and found is None:
            raise ended.error()
        self._claims[claim.key] = claim
        if found is not None:
            self._join(found, claim, now)

    def offered(self, session: Session, offer: Offer, now: float) -> None:
        """A peer has something; it is refused at once, accepted at once, or waits for a claim or for room."""
        key = InKey(offer.transfer_id, offer.part)
        problem = self._problem(session, key, offer, now)
        if problem is not None:
            self._refuse(session, offer.number, problem)
            return
        found = Incoming(key, session, offer, now, now + min(offer.lease_s, self._remember_s))
        self._ended.forget(key)
        self._by_key[key] = self._by_number[session, offer.number] = found
        self._unclaimed.add(session)
        claim = self._claims.get(key)
        if claim is not None:
            self._join(found, claim, now)
        elif not self._is_hurried(now):
            self._try_room(found, now)

    def item_landed(self, session: Session, number: int, items: Iterable[int], now: float) -> None:
        """All bytes of some items are in their places."""
        found = self._by_number.get((session, number))
        if found is None or found.state is not State.LANDING:
            return
        fresh = found.left.intersection(items)
        found.left -= fresh
        if fresh and found.claim is not None and found.place is None:
            found.claim.progress(fresh)
        if found.left or not fresh:
            return
        self._effects.tell(session, Landed(number=number))
        del self._by_number[session, number]
        found.state = State.KEPT
        found.ends_at = now + self._remember_s
        if found.claim is not None:
            self._deliver(found, found.claim)

    def ready(self, session: Session, message: Ready) -> bool:
        """Items of a transfer that has no place yet may be read; False where it has one, or is not known."""
        found = self._by_number.get((session, message.number))
        if found is None or found.state is not State.OFFERED:
            return False
        found.may_read(message.items)
        return True

    def ended(self, session: Session, message: End, now: float) -> bool:
        """The sender gives it up. False where the message is about nothing that is known."""
        found = self._by_number.get((session, message.number))
        if found is None:
            self._effects.tell(session, Stopped(number=message.number, code=message.code, text=message.text))
            return False
        self._give_up(found, TransferError(message.code, f"the sender says: {message.text}"), now)
        return True

    def no_such(self, session: Session, message: NoSuch) -> None:
        """A peer that was asked has nothing."""
        asked = [claim for claim in self._claims.values() if claim.source == session]
        for claim in [claim for claim in asked if claim.key.transfer_id == message.transfer_id]:
            if claim.key not in self._by_key:
                self._fail(claim, TransferError(message.code, f"the sender says: {message.text}"))

    def withdrawn(self, message: Withdraw, now: float) -> None:
        """Nothing will come under an id. What is live under it is told so by itself."""
        key = InKey(message.transfer_id, message.part)
        claim = self._claims.get(key)
        error = TransferError("withdrawn", f"the sender says: nothing will come as {key.transfer_id!r}")
        if claim is not None and key not in self._by_key:
            self._fail(claim, error)
        elif claim is None and self._ended.find(key, now) is None:
            self._ended.remember(key, Remembered(Ending.DROPPED, error.code, error.text, now + self._remember_s))

    def session_lost(self, session: Session, error: TransferError, now: float) -> None:
        """A session has ended, with all that was to come over it. What has landed stays."""
        for found in [found for found in self._by_number.values() if found.session == session]:
            self._give_up(found, copy_of(error), now)
        for claim in [claim for claim in self._claims.values() if claim.source == session]:
            if claim.key not in self._by_key:
                self._fail(claim, copy_of(error))

    def unreachable(self, key: InKey, error: TransferError) -> None:
        """Nobody can be asked for what was claimed."""
        claim = self._claims.get(key)
        if claim is not None and key not in self._by_key:
            self._fail(claim, copy_of(error))

    def landing_stopped(self, session: Session, number: int, now: float) -> None:
        """The carrier does not write into the places of a transfer any more."""
        found = self._by_number.get((session, number))
        if found is not None and found.state is State.STOPPING:
            assert found.error is not None
            self._drop(found, found.error, now)

    def copied(self, key: InKey, error: TransferError | None) -> None:
        """What was kept has been copied to where the claim wanted it, or could not be."""
        found = self._by_key.get(key)
        if found is None or found.state is not State.DELIVERING:
            return
        claim = found.claim
        assert claim is not None
        self._remove(found)
        del self._claims[key]
        self._effects.release(found.place)
        claim.deliver(None, error or found.error)

    def cancel(self, key: InKey, error: TransferError, now: float) -> None:
        """Nobody wants what comes under an id any more; its claim ends once nothing touches its memory."""
        self._ended.remember(key, Remembered(Ending.UNWANTED, error.code, error.text, now + self._remember_s))
        found, claim = self._by_key.get(key), self._claims.get(key)
        if found is None:
            if claim is not None:
                self._fail(claim, error)
        else:
            self._give_up(found, error, now)

    def tick(self, now: float) -> float:
        """End what is over; returns when to come again."""
        for claim in [claim for claim in self._claims.values() if claim.ends_at <= now]:
            claim.ends_at = math.inf  # once is enough
            waited = TransferError("timed_out", f"transfer {claim.key.transfer_id!r} did not come in time")
            self.cancel(claim.key, waited, now)
        for found in [found for found in self._by_key.values() if found.ends_at <= now]:
            found.ends_at = math.inf
            if found.claim is None or found.state is State.OFFERED:
                error = TransferError("expired", f"nobody took transfer {found.key.transfer_id!r} in time")
                self._give_up(found, error, now)
        claims = (claim.ends_at for claim in self._claims.values())
        return min([*claims, *(found.ends_at for found in self._by_key.values())], default=math.inf)

    def fill_room(self, now: float) -> None:
        """Room in the buffer has become free: claimed transfers go first, then those of the peer that holds least."""
        while (first := self._oldest()) is not None and first.is_late(now):
            if not self._try_room(first, now):
                return  # nobody overtakes it any more
        waiting = [found for found in self._by_number.values() if found.state is State.OFFERED]
        waiting.sort(key=lambda found: (found.claim is None, self._effects.held(found.session), found.offered_at))
        for found in waiting:
            self._try_room(found, now)

    def close(self, error: TransferError) -> None:
        """Fail all claims. The carriers have stopped."""
        for claim in list(self._claims.values()):
            self._fail(claim, copy_of(error))

    def _problem(self, session: Session, key: InKey, offer: Offer, now: float) -> TransferError | None:
        """Why the offer is refused, None where it is not."""
        if key in self._by_key or (session, offer.number) in self._by_number:
            return TransferError("duplicate", f"transfer {key.transfer_id!r} is live already")
        claim = self._claims.get(key)
        error = self._effects.unfit(session, offer)
        if claim is None:
            return error or self._unclaimed_problem(session, key, offer, now)
        error = error or claim.problem(offer)
        if error is None and claim.destination is None:
            error = self._effects.too_large(offer)
        if error is not None:
            self._fail(claim, copy_of(error))
        return error

    def _unclaimed_problem(self, session: Session, key: InKey, offer: Offer, now: float) -> TransferError | None:
        ended = self._ended.find(key, now)
        if ended is not None and ended.ending is Ending.UNWANTED:
            return ended.error()
        return self._unclaimed.problem(session) or self._effects.too_large(offer)

    def _join(self, found: Incoming, claim: Claim, now: float) -> None:
        """Bring an offer and the claim to it together."""
        self._unclaimed.remove(found.session)
        found.claim = claim
        error = claim.problem(found.offer)
        if error is not None:
            self._give_up(found, error, now)
        elif found.state is State.KEPT:
            self._deliver(found, claim)
        elif found.state is State.OFFERED and claim.destination is not None:
            self._land(found, claim.destination, now)
        elif found.state is State.OFFERED and not self._is_hurried(now):
            self._try_room(found, now)

    def _try_room(self, found: Incoming, now: float) -> bool:
        found.place = self._effects.reserve(found.session, found.offer)
        if found.place is not None:
            self._land(found, found.place, now)
        return found.place is not None

    def _oldest(self) -> Incoming | None:
        """The first of those that wait for room: the dictionary has them in the order in which they came."""
        return next((found for found in self._by_number.values() if found.state is State.OFFERED), None)

    def _is_hurried(self, now: float) -> bool:
        first = self._oldest()
        return first is not None and first.is_late(now)

    def _land(self, found: Incoming, destination: object, now: float) -> None:
        found.state = State.LANDING
        found.ends_at = math.inf if found.claim else found.ends_at
        left_s = max(0.0, found.offered_at + found.offer.lease_s - now)
        skip_blocks = found.claim.skip_blocks if found.claim else 0
        offer = msgspec.structs.replace(found.offer.without(skip_blocks), lease_s=left_s)
        self._effects.expect(found.session, offer, destination)
        self._effects.tell(found.session, Accept(number=offer.number, skip_blocks=skip_blocks))

    def _deliver(self, found: Incoming, claim: Claim) -> None:
        if found.place is not None and claim.destination is not None:
            found.state = State.DELIVERING
            self._effects.copy(found.key, found.place, claim.destination, claim.skip_blocks)
            return
        self._remove(found)
        del self._claims[claim.key]
        claim.deliver(found.place, None)

    def _give_up(self, found: Incoming, error: TransferError, now: float) -> None:
        """Forget it once nothing touches it any more; a copy that is under way is told its error at its end."""
        found.error = found.error or error
        if found.state is State.LANDING:
            found.state = State.STOPPING
            self._effects.stop_landing(found.session, found.offer.number)
        elif found.state in (State.OFFERED, State.KEPT):
            self._drop(found, error, now)

    def _drop(self, found: Incoming, error: TransferError, now: float) -> None:
        """Nothing touches it any more: forget it, and tell who has to know."""
        landed = found.state is State.KEPT
        self._remove(found)
        self._effects.release(found.place)
        if not landed:
            self._refuse(found.session, found.offer.number, error)
        claim = self._claims.get(found.key)
        if claim is not None and found.claim is claim:
            self._fail(claim, copy_of(error))
        elif self._ended.find(found.key, now) is None:
            dropped = Remembered(Ending.DROPPED, error.code, error.text, now + self._remember_s)
            self._ended.remember(found.key, dropped)

    def _remove(self, found: Incoming) -> None:
        del self._by_key[found.key]
        self._by_number.pop((found.session, found.offer.number), None)
        if found.claim is None:
            self._unclaimed.remove(found.session)

    def _refuse(self, session: Session, number: int, error: TransferError) -> None:
        self.refused[error.code] += 1
        self._effects.tell(session, Stopped(number=number, code=error.code, text=error.text))

    def _fail(self, claim: Claim, error: TransferError) -> None:
        del self._claims[claim.key]
        claim.deliver(None, error)
