"""A rank's transfers with real engines on loopback: the bytes, ends that are told once, no wait for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvferry.connectors.vllm.p2p.handover import Handover
from kvferry.connectors.vllm.p2p.plans import PeerPlan, ReceivePlan, SendPlan
from kvferry.connectors.vllm.p2p.ranks import Rank
from kvferry.connectors.vllm.p2p.worker import GRACE_S, PeerWorker, WorkerRules
from kvferry.connectors.vllm.plans import JobEnd
from kvferry.errors import TransferError
from kvferry.ipc import rehome
from kvferry.p2p import P2pConfig, P2pNcclEngine, Receiving

BLOCKS, HEADS = 16, 4
LAYERS = ("a", "b", "c")
LONG_S = 300.0  # no end of a lease makes the test pass


class Side:
    """One rank of an engine: its worker, and its cache, whose bytes are `fill` at first."""

    def __init__(
        self,
        fill: int,
        *,
        rank: Rank | None = None,
        send_type: str = "PUT_ASYNC",
        lease_s: float = 10.0,
        layer_wise: bool = True,
    ) -> None:
        rank = rank or Rank(0, 1)
        self.caches = {
            name: torch.full((BLOCKS, HEADS // rank.size, 8, 16), fill, dtype=torch.uint8) for name in LAYERS
        }
        rehome(self.caches.values())
        config = P2pConfig(
            send_type=send_type, kv_buffer_size=1 << 20, lease_s=lease_s, tp_rank=rank.number, tp_size=rank.size
        )
        self.engine = P2pNcclEngine(config)
        self.engine.register_kv_caches(self.caches, format="vllm_packed")
        layers = {name: number for number, name in enumerate(LAYERS)}
        self.worker = PeerWorker(self.engine, WorkerRules(rank, layers, send_type, lease_s, layer_wise))

    @property
    def address(self) -> str:
        return self.engine.address

    def mark(self, block: int, value: int) -> None:
        for cache in self.caches.values():
            cache[block] = value

    def values(self, block: int) -> set[int]:
        return {value for cache in self.caches.values() for value in cache[block].flatten().tolist()}

    def send(self, *plans: SendPlan, saved: tuple[str, ...] = LAYERS) -> None:
        """A step that computes."""
        plan = PeerPlan(sends=plans)
        self.worker.start(plan)
        for name in saved:
            self.worker.layer_saved(plan, name)
        self.worker.forward_done(plan)

    def until(self, condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
        """Idle steps until something holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline
            self.worker.poll(idle=True)

    def ends(self) -> dict[int, JobEnd]:
        """Idle steps until jobs have ended: which."""
        found: dict[int, JobEnd] = {}

        def ended() -> bool:
            report = self.worker.take_report()
            found.update(report.ended if report else {})
            return bool(found)

        self.until(ended)
        return found


DONE, FAILED = JobEnd(1, False), JobEnd(1, True)


@pytest.fixture
def make() -> Iterator[Callable[..., Side]]:
    with ExitStack() as stack:

        def made(*args: Any, **more: Any) -> Side:
            side = Side(*args, **more)
            stack.callback(side.worker.close)
            return side

        yield made


def send(
    prefill: Side, *addresses: str, job: int = 1, name: str = "t", blocks: tuple[int, ...] = (2, 3, 4)
) -> SendPlan:
    for number, block in enumerate(blocks):
        prefill.mark(block, 100 + number)
    return SendPlan(job, Handover(name, True, addresses), blocks)


def receive(
    *addresses: str,
    job: int = 7,
    name: str = "t",
    blocks: tuple[int, ...] = (9, 8, 7),
    skip: int = 0,
    ask: bool = False,
) -> PeerPlan:
    handover = Handover(name, False, addresses, ask=ask)
    return PeerPlan(receives=(ReceivePlan(job, f"r{job}", handover, blocks, skip),))


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "PUT", "GET"])
@pytest.mark.parametrize("decode_first", [True, False])
def test_a_prompts_blocks_come_over(make: Callable[..., Side], send_type: str, decode_first: bool) -> None:
    prefill, decode = make(1, send_type=send_type), make(2, send_type=send_type)
    get = send_type == "GET"
    wanted = receive(prefill.address, ask=get)
    if decode_first:
        decode.worker.start(wanted)
    prefill.send(send(prefill, decode.address))
    if not decode_first:
        decode.worker.start(wanted)
    assert decode.ends() == {7: DONE}
    assert prefill.ends() == {1: DONE}
    assert [decode.values(block) for block in (9, 8, 7, 6)] == [{100}, {101}, {102}, {2}]
    assert decode.worker.take_received() == {"r7"}
    assert decode.worker.take_received() == set()
    assert decode.worker.take_failed_blocks() == set()
    assert prefill.worker.counters.take() == {"p2p_sends": 1}
    counts = decode.worker.counters.take()
    assert counts.pop("p2p_receive_seconds") > 0
    assert counts == {"p2p_receives": 1}


def test_what_the_receiver_has_itself_is_left_alone(make: Callable[..., Side]) -> None:
    prefill, decode = make(1), make(2)
    decode.worker.start(receive(prefill.address, blocks=(7,), skip=2))
    prefill.send(send(prefill, decode.address))
    assert decode.ends() == {7: DONE}
    assert [decode.values(block) for block in (9, 8, 7)] == [{2}, {2}, {102}]


def test_layers_go_as_they_are_computed_and_what_nobody_told_of_at_the_end(make: Callable[..., Side]) -> None:
    prefill, decode = make(1), make(2)
    decode.worker.start(receive(prefill.address))
    plan = PeerPlan(sends=(send(prefill, decode.address),))
    for cache in list(prefill.caches.values())[1:]:
        cache.fill_(55)  # not computed yet
    prefill.worker.start(plan)
    prefill.worker.layer_saved(plan, "a")
    prefill.worker.layer_saved(plan, "of another model")
    decode.until(lambda: int(decode.caches["a"][9, 0, 0, 0]) == 100)
    assert int(decode.caches["b"][9, 0, 0, 0]) == 2
    for cache in list(prefill.caches.values())[1:]:
        cache[2:5] = 100
    prefill.worker.forward_done(plan)
    assert decode.ends() == {7: DONE}
    assert decode.values(9) == {100}
    assert decode.values(8) == {100, 101}


def test_where_halves_of_a_batch_would_tell_too_early_layers_wait_for_the_end(make: Callable[..., Side]) -> None:
    prefill, decode = make(1, layer_wise=False), make(2)
    decode.worker.start(receive(prefill.address))
    plan = PeerPlan(sends=(send(prefill, decode.address),))
    for name in LAYERS:
        prefill.worker.layer_saved(plan, name)
    assert not prefill.worker._sends
    prefill.worker.forward_done(plan)
    assert decode.ends() == {7: DONE}


def test_without_an_address_it_is_kept_until_it_is_asked_for(make: Callable[..., Side]) -> None:
    prefill, decode = make(1), make(2)
    prefill.send(send(prefill))
    decode.worker.start(receive(prefill.address, ask=True))
    assert decode.ends() == {7: DONE}
    assert prefill.ends() == {1: DONE}


def test_with_get_nothing_goes_before_it_is_asked_for(make: Callable[..., Side]) -> None:
    """Whatever address the request named: here nobody listens there."""
    prefill, decode = (make(fill, send_type="GET") for fill in (1, 2))
    prefill.send(send(prefill, "127.0.0.1:9"))
    decode.worker.start(receive(prefill.address, ask=True))
    assert decode.ends() == {7: DONE}
    assert prefill.ends() == {1: DONE}


@pytest.mark.parametrize("asked", [True, False])
def test_a_prefill_that_will_not_be_fails_the_wait_at_once(make: Callable[..., Side], asked: bool) -> None:
    send_type = "GET" if asked else "PUT_ASYNC"
    prefill, decode = (make(fill, send_type=send_type, lease_s=LONG_S) for fill in (1, 2))
    decode.worker.start(receive(prefill.address, ask=asked))
    prefill.worker.start(PeerPlan(dropped=(Handover("t", True, (decode.address,)),)))
    assert decode.ends() == {7: FAILED}
    assert decode.worker.take_failed_blocks() == {9, 8, 7}
    assert decode.worker.take_received() == {"r7"}


@pytest.mark.parametrize("asks", [True, False])
def test_what_is_not_wanted_is_not_kept(make: Callable[..., Side], asks: bool) -> None:
    """Before and after it was sent."""
    prefill, decode = (make(fill, lease_s=LONG_S) for fill in (1, 2))
    addresses = () if asks else (decode.address,)
    if asks:
        prefill.send(send(prefill, *addresses))
    decode.worker.start(PeerPlan(dropped=(Handover("t", False, (prefill.address,), ask=asks),)))
    if not asks:
        prefill.send(send(prefill, *addresses))
    assert prefill.ends() == {1: FAILED}


@pytest.mark.parametrize("asks", [True, False])
def test_what_is_not_wanted_is_kept_by_no_rank(make: Callable[..., Side], asks: bool) -> None:
    """Of a prefill engine of two ranks, before and after each has sent; decided by one rank."""
    send_type = "GET" if asks else "PUT_ASYNC"
    decode = make(2, send_type=send_type, lease_s=LONG_S)
    prefills = [make(1, rank=Rank(number, 2), send_type=send_type, lease_s=LONG_S) for number in range(2)]
    prefills[0].send(send(prefills[0], decode.address))
    if not asks:
        decode.until(lambda: decode.engine.stats()["unclaimed"] == 1)
    addresses = tuple(side.address for side in prefills)
    if asks:
        prefills[1].send(send(prefills[1], decode.address))
    decode.worker.start(PeerPlan(dropped=(Handover("t", False, addresses, ask=asks),)))
    if not asks:
        prefills[1].send(send(prefills[1], decode.address))
        assert prefills[1].ends() == {1: FAILED}
        return  # what had landed in the buffer before has ended well
    assert [side.ends() for side in prefills] == [{1: FAILED}] * 2


@pytest.mark.parametrize("asked", [True, False])
def test_a_prefill_engine_that_ends_before_it_sends_fails_the_wait_at_once(
    make: Callable[..., Side], asked: bool
) -> None:
    prefill, decode = (make(fill, lease_s=LONG_S) for fill in (1, 2))
    decode.worker.start(receive(prefill.address, ask=asked))
    decode.until(lambda: prefill.engine.stats()["peers"])
    prefill.worker.close()
    assert decode.ends() == {7: FAILED}
    assert decode.worker.take_failed_blocks() == {9, 8, 7}


def test_a_prefill_engine_that_is_not_there_fails_the_wait(make: Callable[..., Side]) -> None:
    """What comes under its id nevertheless is not kept."""
    prefill, decode = (make(fill, lease_s=LONG_S) for fill in (1, 2))
    decode.worker.start(receive("127.0.0.1:9"))
    assert decode.ends() == {7: FAILED}
    prefill.send(send(prefill, decode.address))
    assert prefill.ends() == {1: FAILED}


def test_a_cancelled_wait_ends_and_so_does_a_cancelled_send(make: Callable[..., Side]) -> None:
    prefill, decode = (make(fill, lease_s=LONG_S) for fill in (1, 2))
    decode.worker.start(receive(prefill.address))
    decode.worker.start(PeerPlan(cancelled=(7, 99)))
    assert decode.ends() == {7: FAILED}
    assert decode.worker.take_received() == {"r7"}
    prefill.send(send(prefill, name="kept"))
    prefill.worker.start(PeerPlan(cancelled=(1,)))
    assert prefill.ends() == {1: FAILED}


def test_a_wait_has_a_deadline(make: Callable[..., Side]) -> None:
    """That of the connector, whatever that of its engine is."""
    prefill, decode = make(1), make(2, lease_s=LONG_S)
    decode.worker = PeerWorker(decode.engine, WorkerRules(Rank(0, 1), {}, "PUT_ASYNC", 0.2))
    decode.worker.start(receive(prefill.address))
    assert decode.ends() == {7: FAILED}


def test_the_other_engine_ends_in_mid_transfer(make: Callable[..., Side]) -> None:
    prefill, decode = make(1), make(2)
    decode.worker.start(receive(prefill.address))
    plan = PeerPlan(sends=(send(prefill, decode.address),))
    prefill.worker.start(plan)
    prefill.worker.layer_saved(plan, "a")
    decode.until(lambda: int(decode.caches["a"][9, 0, 0, 0]) == 100)
    prefill.worker.close()
    assert decode.ends() == {7: FAILED}
    assert decode.worker.take_failed_blocks() == {9, 8, 7}


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_engines_of_several_ranks(make: Callable[..., Side], senders: int, receivers: int, send_type: str) -> None:
    prefills = [make(1, rank=Rank(number, senders), send_type=send_type) for number in range(senders)]
    decodes = [make(2, rank=Rank(number, receivers), send_type=send_type) for number in range(receivers)]
    sources, targets = [side.address for side in prefills], [side.address for side in decodes]
    for side in decodes:
        side.worker.start(receive(*sources, ask=send_type == "GET"))
    for number, side in enumerate(prefills):
        plan = send(side, *targets)
        for cache in side.caches.values():
            for head in range(cache.shape[1]):
                cache[2, head] = number * cache.shape[1] + head  # the head's number in the whole
        side.send(plan)
    for number, side in enumerate(decodes):
        assert side.ends() == {7: DONE}
        each = HEADS // receivers
        for cache in side.caches.values():
            found = [set(cache[9, head].flatten().tolist()) for head in range(each)]
            assert found == [{number * each + head} for head in range(each)]
    for side in prefills:
        assert side.ends() == {1: DONE}


def test_a_rank_that_has_nothing_to_send_ends_at_once(make: Callable[..., Side]) -> None:
    """Latent attention: both ranks have all of it, and one of them sends it."""
    side = make(1, rank=Rank(1, 2, replicated=True))
    side.send(send(side, "127.0.0.1:9"))
    assert side.ends() == {1: DONE}


def test_put_waits_for_a_moment_and_goes_on(make: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.connectors.vllm.p2p.worker.PUT_WAIT_S", 0.2)
    prefill = make(1, send_type="PUT", lease_s=LONG_S)
    prefill.send(send(prefill))  # nobody asks
    assert not prefill.worker.take_report()
    prefill.worker.start(PeerPlan(cancelled=(1,)))
    assert prefill.ends() == {1: FAILED}


def test_what_cannot_even_begin_fails(make: Callable[..., Side]) -> None:
    side = make(1)
    nothing = ReceivePlan(1, "r1", None, (3,), 0)
    outside = ReceivePlan(2, "r2", Handover("t", False), (BLOCKS,), 0)
    nowhere = ReceivePlan(3, "r3", Handover("u", False, ("no.such.host.invalid:1",), ask=True), (4,), 0)
    side.worker.start(PeerPlan(receives=(nothing, outside, nowhere)))
    side.send(SendPlan(4, Handover("v", True, ("no.such.host.invalid:1",)), (5,)))
    assert side.ends() == dict.fromkeys((1, 2, 3, 4), FAILED)
    assert side.worker.take_failed_blocks() == {3, 4, BLOCKS}
    assert side.worker.take_received() == {"r1", "r2", "r3"}


def test_without_an_engine_everything_fails_at_once() -> None:
    worker = PeerWorker(None, WorkerRules(Rank(0, 1), {}, "PUT_ASYNC", 10.0))
    assert worker.address is None
    worker.start(receive("127.0.0.1:9"))
    plan = PeerPlan(sends=(SendPlan(1, Handover("t", True), (1,)),), dropped=(Handover("u", True),))
    worker.start(plan)
    worker.forward_done(plan)
    report = worker.take_report()
    assert report is not None
    assert report.ended == {7: FAILED, 1: FAILED}
    worker.close()


class Stuck:
    """An engine whose transfers do not stop in time."""

    def __init__(self) -> None:
        self.receiving = Receiving("t", 1, 1)

    def receive_blocks(self, *_: Any, **__: Any) -> Receiving:
        return self.receiving

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("can_drop", "skip"), [(True, 0), (True, 1), (False, 0), (False, 1)])
def test_a_transfer_that_does_not_stop_is_given_up(can_drop: bool, skip: int) -> None:
    """Its blocks are its own until it ends. Older releases take all blocks from a request or none."""
    now = [0.0]
    stuck = Stuck()
    rules = WorkerRules(Rank(0, 1), {}, "PUT_ASYNC", 10.0, can_drop_loads=can_drop)
    worker = PeerWorker(stuck, rules, clock=lambda: now[0])  # type: ignore[arg-type]
    worker.start(receive("127.0.0.1:9", skip=skip))
    now[0] = 10.0 + GRACE_S
    worker.poll(idle=False)
    assert not worker.take_received()
    now[0] += 0.1
    worker.poll(idle=False)
    if not can_drop and skip:
        assert not worker.take_received()
        return
    assert worker.take_received() == {"r7"}
    assert worker.dropped == {"r7"}
    assert worker.take_failed_blocks() == (set() if can_drop else {9, 8, 7})
    report = worker.take_report()
    assert report is not None
    assert (report.dropped, report.ended) == ({"r7"}, {})
    stuck.receiving.part_ended(TransferError("closed", "at last"))
    worker.poll(idle=False)
    report = worker.take_report()
    assert report is not None
    assert report.ended == {7: FAILED}
    assert not worker.take_received()


def test_each_kind_of_failure_is_said_once(make: Callable[..., Side], caplog: pytest.LogCaptureFixture) -> None:
    side = make(1)
    for job in range(3):
        side.worker.start(PeerPlan(receives=(ReceivePlan(job, f"r{job}", None, (3,), 0),)))
    assert sum("tokens are computed" in record.message for record in caplog.records) == 1


def test_who_waits_for_what_cannot_be_sent_is_told_at_once(make: Callable[..., Side]) -> None:
    prefill, decode = (make(fill, lease_s=LONG_S) for fill in (1, 2))
    decode.worker.start(receive(prefill.address))
    prefill.send(SendPlan(1, Handover("t", True, (decode.address,)), (BLOCKS,)))  # no such block
    assert decode.ends() == {7: FAILED}
    assert prefill.ends() == {1: FAILED}
