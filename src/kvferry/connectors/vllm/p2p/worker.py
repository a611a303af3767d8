"""A worker's side: gives this rank's transfers to its engine, and finds out how they end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.connectors.vllm.counters import P2P_COUNTERS, Counters
from kvferry.connectors.vllm.outcomes import Outcomes
from kvferry.connectors.vllm.p2p.handover import Handover
from kvferry.connectors.vllm.p2p.plans import PeerPlan, ReceivePlan, SendPlan
from kvferry.connectors.vllm.p2p.ranks import Addresses, Rank
from kvferry.errors import DeadlineError, KVFerryError, PeerGoneError, TransferError
from kvferry.p2p import P2pNcclEngine, Receiving, Sending

# In a step that computes nothing a worker waits so long for a transfer, which costs less than stepping in a circle.
IDLE_WAIT_S = 0.002
PUT_WAIT_S = 5.0  # with send type PUT a step waits so long for what it sends; then that goes on beside the next
GRACE_S = 5.0  # beyond its deadline, for a transfer that has to be stopped; then its blocks stay out of use until it is
_LOG = logging.getLogger("vllm.kvferry")


@dataclass(frozen=True, slots=True)
class WorkerRules:
    """What does not change while the engine runs. `layers` are the items of a transfer by the names of layers."""

    rank: Rank
    layers: Mapping[str, int]
    send_type: str
    lease_s: float
    layer_wise: bool = True
    can_drop_loads: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class _Send:
    """`sending` is None where this rank has nothing to send."""

    plan: SendPlan
    sending: Sending | None


@dataclass(slots=True, eq=False)
class _Receive:
    plan: ReceivePlan
    receiving: Receiving
    begun_s: float
    given_up: bool = False


class PeerWorker(Outcomes):
    """The transfers of one rank. One thread, vLLM's, waits for them: a moment in an idle step, or as PUT wants it.

    The engine's own thread calls `_wake.set` when one of them has ended.
    """

    def __init__(
        self, engine: P2pNcclEngine | None, rules: WorkerRules, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.counters = Counters(P2P_COUNTERS)
        self._engine = engine
        self._rules = rules
        self._clock = clock
        self._sends: dict[int, _Send] = {}  # by job
        self._receives: dict[int, _Receive] = {}
        self._new_sends: list[Sending] | None = None  # this step's, once they have begun
        self._saved: set[int] = set()  # of which layers this step's sends have been told
        self._told: set[str] = set()
        self._wake = threading.Event()

    @property
    def address(self) -> str | None:
        """Where this rank's engine is reached; None where there is none."""
        return None if self._engine is None else self._engine.address

    def start(self, plan: PeerPlan) -> None:
        """Begin to receive what the step wants received, and give up what is not wanted."""
        for receive in plan.receives:
            self._begin_receive(receive)
        for job_id in plan.cancelled:
            if job_id in self._receives:
                self._receives[job_id].receiving.cancel()
            elif (send := self._sends.get(job_id)) is not None and send.sending is not None:
                send.sending.cancel()
        for handover in plan.dropped:
            with contextlib.suppress(KVFerryError):  # the other side's deadline stands in for the word
                self._drop(handover)

    def layer_saved(self, plan: PeerPlan, layer_name: str) -> None:
        """The step has computed a layer, or has queued that: what it sends of it may go."""
        if not plan.sends or not self._rules.layer_wise:
            return
        item = self._rules.layers.get(layer_name)
        if item is not None and item not in self._saved:
            self._saved.add(item)
            for sending in self._begin_sends(plan):
                sending.layer_ready(item)

    def forward_done(self, plan: PeerPlan) -> None:
        """All layers are computed, or queued; also those of which nobody said so, as in a CUDA graph."""
        if not plan.sends:
            return
        sendings, saved = self._begin_sends(plan), self._saved
        self._new_sends, self._saved = None, set()
        for sending in sendings:
            for item in sorted(set(self._rules.layers.values()) - saved):
                sending.layer_ready(item)
        if self._rules.send_type == "PUT":
            until = self._clock() + min(PUT_WAIT_S, self._rules.lease_s)
            for sending in sendings:
                with contextlib.suppress(DeadlineError, TransferError):  # which `poll` sees, too
                    sending.wait(max(0.0, until - self._clock()))

    def poll(self, *, idle: bool) -> None:
        """See which transfers have ended. In an `idle` step a moment is spent on waiting for one."""
        self._wake.clear()
        if not self._look() and idle and (self._sends or self._receives) and self._wake.wait(IDLE_WAIT_S):
            self._look()

    def close(self) -> None:
        """End all transfers. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _running(self) -> P2pNcclEngine:
        if self._engine is None:
            raise TransferError("closed", "this rank has no engine")
        return self._engine

    def _begin_receive(self, plan: ReceivePlan) -> None:
        handover, lease_s = plan.handover, self._rules.lease_s
        try:
            if handover is None:
                raise TransferError("mismatch", "vLLM loads other tokens than were offered")
            sources = self._sources(handover)
            receiving = self._running().receive_blocks(
                handover.transfer_id,
                plan.block_ids,
                sources if handover.ask else None,
                skip_blocks=plan.skip_blocks,
                senders=sources or 1,
                tag=plan.tag,
                timeout_s=lease_s,
            )
        except (KVFerryError, ValueError) as error:
            self._fail_receive(plan, error)
            return
        self._receives[plan.job_id] = _Receive(plan, receiving, self._clock())
        receiving.add_done_callback(lambda _: self._wake.set())

    def _begin_sends(self, plan: PeerPlan) -> list[Sending]:
        """This step's sends; they begin with the first of its layers."""
        if self._new_sends is None:
            self._new_sends = []
            for send in plan.sends:
                self._begin_send(send, self._new_sends)
        return self._new_sends

    def _begin_send(self, plan: SendPlan, begun: list[Sending]) -> None:
        handover, rules = plan.handover, self._rules
        targets = rules.rank.targets(handover.addresses) if handover.addresses else ()
        if handover.addresses and not targets:
            self._sends[plan.job_id] = _Send(plan, None)
            return
        keep = rules.send_type == "GET" or not targets
        try:
            sending = self._running().send_blocks(
                handover.transfer_id,
                plan.block_ids,
                None if keep else targets,
                readers=len(targets) or 1,
                layer_wise=True,
                tag=plan.tag,
            )
        except (KVFerryError, ValueError) as error:
            self._fail_send(plan, error)
            return
        self._sends[plan.job_id] = _Send(plan, sending)
        sending.add_done_callback(lambda _: self._wake.set())
        begun.append(sending)

    def _drop(self, handover: Handover) -> None:
        engine, rank, addresses = self._running(), self._rules.rank, handover.addresses
        if handover.sends:
            pushes = bool(addresses) and self._rules.send_type != "GET"
            engine.withdraw(handover.transfer_id, rank.targets(addresses) if pushes else None)
            return
        sources = self._sources(handover)
        engine.reject(handover.transfer_id, sources if handover.ask else None, senders=len(sources) or 1)

    def _sources(self, handover: Handover) -> Addresses:
        """The ranks that this one gets KV from; none where they are not known."""
        return self._rules.rank.sources(handover.addresses) if handover.addresses else ()

    def _look(self) -> bool:
        """Whether a transfer has ended, or was given up."""
        sent = [job_id for job_id, send in self._sends.items() if self._end_send(send)]
        received = [job_id for job_id, receive in self._receives.items() if self._end_receive(receive)]
        for job_id in sent:
            del self._sends[job_id]
        for job_id in received:
            del self._receives[job_id]
        return bool(sent or received or self._received)

    def _end_send(self, send: _Send) -> bool:
        sending = send.sending
        if sending is not None and not sending.done():
            return False
        error = None if sending is None else sending.error
        if error is not None:
            self._fail_send(send.plan, error)
            return True
        self._report.add(send.plan.job_id, failed=False)
        self.counters.add("p2p_sends", sending is not None)
        return True

    def _end_receive(self, receive: _Receive) -> bool:
        plan, age_s = receive.plan, self._clock() - receive.begun_s
        if not receive.receiving.done():
            droppable = self._rules.can_drop_loads or plan.skip_blocks == 0
            if age_s > self._rules.lease_s + GRACE_S and droppable and not receive.given_up:
                self._give_up(receive)
            return False
        error = receive.receiving.error
        if receive.given_up:
            self._report.add(plan.job_id, failed=True)
        elif error is not None:
            self._fail_receive(plan, error)
        else:
            self._received.add(plan.request_id)
            self._report.add(plan.job_id, failed=False)
            self.counters.add("p2p_receives")
            self.counters.add("p2p_receive_seconds", age_s)
            self._told.clear()
        return True

    def _give_up(self, receive: _Receive) -> None:
        """What writes there has not stopped: the request is computed in other blocks, as vLLM takes these from it."""
        plan = receive.plan
        receive.given_up = True
        if not self._rules.can_drop_loads:
            self._failed_blocks.update(plan.block_ids)
        self._received.add(plan.request_id)
        self._report.dropped.add(plan.request_id)
        self.counters.add("p2p_receives_failed")
        _LOG.warning("a transfer has not stopped: its %d blocks stay out of use until it has", len(plan.block_ids))

    def _fail_receive(self, plan: ReceivePlan, error: Exception) -> None:
        self._failed_blocks.update(plan.block_ids)
        self._received.add(plan.request_id)
        self._report.add(plan.job_id, failed=True)
        self.counters.add("p2p_receives_failed")
        self._tell("KV has not come, so its tokens are computed", error)
        if plan.handover is not None:
            with contextlib.suppress(KVFerryError):  # who may still send it need not keep it
                self._drop(plan.handover)

    def _fail_send(self, plan: SendPlan, error: Exception) -> None:
        self._report.add(plan.job_id, failed=True)
        self.counters.add("p2p_sends_failed")
        self._tell("KV was not sent, or not taken", error)
        if not isinstance(error, PeerGoneError):
            with contextlib.suppress(KVFerryError):  # who waits for it learns now that it is in vain
                self._drop(plan.handover)

    def _tell(self, what: str, error: Exception) -> None:
        """Log each kind of failure once, until KV comes again."""
        kind = f"{what} {type(error).__name__} {getattr(error, 'code', '')}"
        if kind not in self._told:
            self._told.add(kind)
            _LOG.warning("%s: %s", what, error)
