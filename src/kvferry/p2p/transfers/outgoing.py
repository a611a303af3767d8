"""The sending side of transfers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import msgspec

from kvferry.errors import TransferError
from kvferry.p2p.signal.messages import Accept, Ask, End, Landed, NoSuch, Ready, Reject, Stopped
from kvferry.p2p.transfers.memory import EndedIds, Ending, Remembered
from kvferry.p2p.transfers.outgoing_records import Outcome, Outgoing, OutKey, SenderEffects, Session, State

_LOG = logging.getLogger(__name__)
MAX_ASKS = 4096


class OutgoingTable:
    """All transfers that this engine sends. For the loop's thread."""

    def __init__(self, effects: SenderEffects, *, remember_s: float) -> None:
        self._effects = effects
        self._remember_s = remember_s
        self._by_key: dict[OutKey, Outgoing] = {}
        self._by_number: dict[int, Outgoing] = {}
        self._asks: dict[OutKey, tuple[Session, float]] = {}
        self._ended: EndedIds[OutKey] = EndedIds()
        self._withdrawn: EndedIds[str] = EndedIds()
        self.blocks_kept_beyond_lease = 0  # transfers whose peer has not stopped though their lease is over

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, out: Outgoing, session: Session, now: float) -> None:
        """Take a transfer in; `session` is None where there is none (yet).

        Raises TransferError ("duplicate") where one with its key is live.
        """
        if out.key in self._by_key:
            raise TransferError("duplicate", f"transfer {out.key.transfer_id!r} to {out.key.target!r} is being sent")
        self._ended.forget(out.key)
        self._withdrawn.forget(out.key.transfer_id)
        self._by_key[out.key] = self._by_number[out.number] = out
        out.state = State.CONNECTING if isinstance(out.key.target, str) else State.KEPT
        asker = self._asks.pop(out.key, None)
        if session is None and asker is not None:
            session = asker[0]
        if session is not None:
            self._offer(out, session, now)

    def connected(self, address: str, session: Session, now: float) -> None:
        """The session to an address is up: offer what waits for it."""
        for out in [out for out in self._by_number.values() if out.state is State.CONNECTING]:
            if out.key.target == address:
                self._offer(out, session, now)

    def unreachable(self, address: str, error: TransferError) -> None:
        """There will be no session to an address."""
        for out in [out for out in self._by_number.values() if out.state is State.CONNECTING]:
            if out.key.target == address:
                self._finish(out, copy_of(error))

    def asked(self, session: Session, ask: Ask, now: float) -> None:
        """A peer wants what is kept under an id."""
        key = OutKey(ask.transfer_id, ask.part)
        out = self._by_key.get(key)
        ended = self._withdrawn.find(ask.transfer_id, now) or (None if out else self._ended.find(key, now))
        if out is not None and out.state is State.KEPT:
            self._offer(out, session, now)
        elif ended is not None:
            self._no_such(session, ask, ended.code, ended.text)
        elif out is not None:
            self._no_such(session, ask, "taken", "it is being sent to another engine")
        elif key in self._asks or len(self._asks) >= MAX_ASKS:
            self._no_such(session, ask, "too_many", "too many engines wait for what is not there")
        else:
            self._asks[key] = (session, now + ask.wait_s)

    def accepted(self, session: Session, message: Accept) -> bool:
        """The peer has a place for all of it. False where the message is about nothing that is known."""
        out = self._find(session, message.number)
        if out is None or out.state is not State.OFFERED:
            return out is not None
        if message.skip_blocks:
            if message.skip_blocks >= out.offer.num_blocks:
                text = (
                    f"the receiver wants none of {out.offer.num_blocks} blocks, but for the first {message.skip_blocks}"
                )
                self._effects.tell(session, End(number=out.number, code="malformed", text=text))
                self._end(out, TransferError("malformed", text))
                return True
            self._effects.skip_blocks(out.number, message.skip_blocks)
        out.state = State.SENDING
        for item in sorted(out.ready - out.started):
            self._start(out, item)
        return True

    def items_ready(self, number: int, items: Iterable[int]) -> None:
        """The source bytes of some items are there."""
        out = self._by_number.get(number)
        if out is None:
            return
        new = [item for item in dict.fromkeys(items) if item not in out.ready]
        out.ready.update(new)
        if out.state is State.SENDING:
            for item in new:
                self._start(out, item)
        elif out.state is State.OFFERED:
            early = tuple(self._effects.start_early(out.session, number, new))
            if early:
                out.started.update(early)
                self._effects.tell(out.session, Ready(number=number, items=early))

    def landed(self, session: Session, message: Landed) -> bool:
        """The peer has all of it."""
        out = self._find(session, message.number)
        if out is not None and out.state is State.SENDING and len(out.started) == len(out.offer.item_bytes):
            self._effects.peer_stopped(session, out.number)
            self._end(out, None)
        return out is not None

    def stopped(self, session: Session, message: Stopped) -> bool:
        """The peer refuses it, gives it up, or has stopped as it was told to."""
        out = self._find(session, message.number)
        if out is None:
            return False
        self._effects.peer_stopped(session, out.number)
        if out.state is not State.ENDING:
            self._end(out, TransferError(message.code, f"the receiver says: {message.text}"))
        return True

    def rejected(self, session: Session, message: Reject, now: float) -> None:
        """A peer will not take what is kept, or offered to it, under an id."""
        for out in list(self._by_number.values()):
            kept = out.state is State.KEPT and out.key == (message.transfer_id, message.part)
            if kept or (out.session == session and out.state is State.OFFERED and out.key[0] == message.transfer_id):
                error = TransferError("rejected", f"the receiver does not want {message.transfer_id!r}")
                if out.started:
                    self._effects.tell(session, End(number=out.number, code=error.code, text=error.text))
                self._end(out, error)

    def released(self, number: int) -> None:
        """The carrier does not read the source any more."""
        out = self._by_number.get(number)
        if out is not None and out.state is State.ENDING:
            self._finish(out, out.outcome)

    def cancel(self, number: int, now: float, error: TransferError) -> None:
        """Give a transfer up; its peer is told."""
        out = self._by_number.get(number)
        if out is None or out.state is State.ENDING:
            return
        self._ended.remember(out.key, Remembered(Ending.DROPPED, error.code, error.text, now + self._remember_s))
        if out.state in (State.OFFERED, State.SENDING):
            self._effects.tell(out.session, End(number=number, code=error.code, text=error.text))
        self._end(out, error)

    def withdraw(self, transfer_id: str, now: float) -> None:
        """Nothing will come under an id: all that is live ends, and whoever asks for it, now or later, is told so."""
        error = TransferError("withdrawn", f"{transfer_id!r} was withdrawn")
        told = Remembered(Ending.DROPPED, error.code, error.text, now + self._remember_s)
        self._withdrawn.remember(transfer_id, told)
        for key in [key for key in self._asks if key.transfer_id == transfer_id]:
            session, _ = self._asks.pop(key)
            self._no_such(session, Ask(transfer_id=transfer_id, part=int(key.target), wait_s=0), told.code, told.text)
        for out in [out for out in self._by_number.values() if out.key.transfer_id == transfer_id]:
            self.cancel(out.number, now, copy_of(error))

    def session_lost(self, session: Session, error: TransferError) -> None:
        """A session has ended, with all that was sent over it."""
        for key in [key for key, (asker, _) in self._asks.items() if asker == session]:
            del self._asks[key]
        for out in [out for out in self._by_number.values() if out.session == session]:
            if out.state is not State.ENDING:
                self._end(out, copy_of(error))

    def tick(self, now: float) -> float:
        """End leases that are over; returns when to come again."""
        for key, (session, until) in list(self._asks.items()):
            if until <= now:
                del self._asks[key]
                ask = Ask(transfer_id=key.transfer_id, part=int(key.target), wait_s=0)
                self._no_such(session, ask, "unknown", "nothing was sent under this id in time")
        for out in list(self._by_number.values()):
            if out.lease_ends_at > now:
                continue
            if out.state is not State.ENDING:
                self.cancel(out.number, now, TransferError("expired", f"the lease of {out.key.transfer_id!r} is over"))
            if out.state is State.ENDING and out.number in self._by_number and not out.overdue:
                out.overdue = True
                _LOG.warning(
                    "the lease of %r is over, its reader has not stopped: blocks are kept", out.key.transfer_id
                )
                self.blocks_kept_beyond_lease += 1
        times = [out.lease_ends_at for out in self._by_number.values() if not out.overdue]
        return min([*times, *(until for _, until in self._asks.values())], default=math.inf)

    def close(self, error: TransferError) -> None:
        """End all; what a carrier reads ends with the carrier."""
        for out in list(self._by_number.values()):
            self._finish(out, copy_of(error))

    def _find(self, session: Session, number: int) -> Outgoing | None:
        out = self._by_number.get(number)
        return out if out is not None and out.session == session else None

    def _offer(self, out: Outgoing, session: Session, now: float) -> None:
        offer = self._effects.fitted(session, out.offer)
        if isinstance(offer, TransferError):
            self._finish(out, offer)
            return
        out.state, out.session, out.offer = State.OFFERED, session, offer
        out.started.update(self._effects.start_early(session, out.number, sorted(out.ready)))
        lease_s = max(0.0, out.lease_ends_at - now)
        self._effects.tell(session, msgspec.structs.replace(offer, lease_s=lease_s, ready=tuple(sorted(out.started))))

    def _start(self, out: Outgoing, item: int) -> None:
        out.started.add(item)
        self._effects.start_item(out.session, out.number, item)

    def _end(self, out: Outgoing, outcome: Outcome) -> None:
        if out.started:
            out.state, out.outcome = State.ENDING, outcome
            self._effects.stop_source(out.session, out.number)
        else:
            self._finish(out, outcome)

    def _finish(self, out: Outgoing, outcome: Outcome) -> None:
        del self._by_key[out.key], self._by_number[out.number]
        self.blocks_kept_beyond_lease -= out.overdue
        out.done(outcome)

    def _no_such(self, session: Session, ask: Ask, code: str, text: str) -> None:
        self._effects.tell(session, NoSuch(transfer_id=ask.transfer_id, part=ask.part, code=code, text=text))


def copy_of(error: TransferError) -> TransferError:
    """Each who is told gets an error of its own: one that is raised holds on to where that was."""
    return type(error)(error.code, error.text)
