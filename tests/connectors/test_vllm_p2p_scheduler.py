"""Which KV is sent, which is waited for: once a request, with its blocks held until all ranks have ended."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.vllm_doubles import Cached, Clock, New, Output, Pool, Request
from kvferry.connectors.vllm.p2p.handover import Handover, Part
from kvferry.connectors.vllm.p2p.plans import PeerPlan
from kvferry.connectors.vllm.p2p.scheduler import PeerScheduler
from kvferry.connectors.vllm.plans import WorkReport

BLOCK = 8
OWN = ("127.0.0.1:7000", "127.0.0.1:7001")
THEIRS = ["127.0.0.1:8000"]


class Scene:
    """A scheduler's side with blocks of 8 tokens, and vLLM's pool."""

    def __init__(self, *, get: bool = False, tp_size: int = 1, sends: bool = True, receives: bool = True) -> None:
        self.pool = Pool()
        self.side = PeerScheduler(BLOCK, Part(sends, receives, get, tp_size), clock=Clock())
        self.side.jobs.bind(self.pool)
        self.side.own_addresses = OWN[:tp_size]

    def step(self, output: Output | None = None) -> PeerPlan:
        return self.side.plan(output or Output())

    def first_step(self, request: Request, blocks: list[int], scheduled: int, computed: int = 0) -> PeerPlan:
        new = New(request.request_id, (blocks,), computed)
        return self.step(Output([new], num_scheduled_tokens={request.request_id: scheduled}))

    def next_step(self, request: Request, blocks: list[int] | None, scheduled: int, computed: int) -> PeerPlan:
        cached = Cached([request.request_id], [None if blocks is None else (blocks,)], [computed])
        return self.step(Output([], cached, {request.request_id: scheduled}))

    def end(self, job_id: int, *, failed: bool = False) -> None:
        report = WorkReport()
        report.add(job_id, failed=failed)
        self.side.ended(report)

    def finish(self, request: Request, status: str = "FINISHED_LENGTH_CAPPED") -> dict[str, Any] | None:
        request.status = status
        return self.side.finished(request)


def sender(length: int, name: str = "p", **params: Any) -> Request:
    wanted = {"transfer_id": "t", "do_remote_decode": True, "remote_addresses": THEIRS, **params}
    return Request(name, list(range(length)), kv_transfer_params=wanted)


def receiver(length: int, name: str = "d", **params: Any) -> Request:
    wanted = {"transfer_id": "t", "do_remote_prefill": True, "remote_addresses": THEIRS, **params}
    return Request(name, list(range(length)), kv_transfer_params=wanted)


# Receiving


@pytest.mark.parametrize(
    ("length", "local", "wanted"),
    [
        (512, 0, (511, True)),  # the last token is computed here
        (512, 16, (495, True)),
        (512, 504, (7, True)),
        (65, 64, (0, False)),
        (2, 0, (1, True)),
        (1, 0, (0, False)),
    ],
)
def test_how_many_tokens_are_waited_for(length: int, local: int, wanted: tuple[int, bool]) -> None:
    scene = Scene()
    assert {scene.side.matched(receiver(length), local) for _ in range(34)} == {wanted}


def test_from_the_question_to_the_end_of_the_transfer() -> None:
    """Asked, asked again, allocated, asked, filled, asked: one transfer, its blocks held until it has ended."""
    scene, request = Scene(), receiver(60)
    scene.side.matched(request, 16)
    scene.side.allocated(request, list(range(1, 9)), 43)
    assert scene.side.matched(request, 16) == (None, False)
    (receive,) = scene.step().receives
    assert receive.handover == Handover("t", False, tuple(THEIRS))
    assert (receive.block_ids, receive.skip_blocks) == ((3, 4, 5, 6, 7, 8), 2)
    assert scene.pool.held() == [3, 4, 5, 6, 7, 8]
    assert scene.step() == PeerPlan(idle=True)
    assert scene.side.expects_ends()
    scene.end(receive.job_id)
    assert not scene.pool.held()
    scene.side.allocated(request, list(range(1, 9)), 0)  # vLLM calls again, with nothing to wait for
    assert scene.side.matched(request, 16) == (0, False)  # preempted, and asked anew: computed here
    assert scene.finish(request) is None
    assert not scene.side.expects_ends()
    assert scene.step() == PeerPlan(idle=True)
    assert scene.side.counters.take() == {"p2p_received_tokens": 43}


def test_after_a_failure_the_request_is_computed_here() -> None:
    scene, request = Scene(), receiver(60)
    scene.side.matched(request, 0)
    scene.side.allocated(request, list(range(1, 9)), 59)
    (receive,) = scene.step().receives
    scene.end(receive.job_id, failed=True)
    assert scene.side.matched(request, 0) == (0, False)


def test_what_is_given_up_unended_keeps_its_blocks() -> None:
    scene, request = Scene(), receiver(60)
    scene.side.matched(request, 0)
    scene.side.allocated(request, list(range(1, 9)), 59)
    (receive,) = scene.step().receives
    scene.side.ended(WorkReport(dropped={"d"}))
    assert scene.side.matched(request, 0) == (0, False)
    assert scene.finish(request) is None
    assert scene.pool.held() == list(range(1, 9))
    scene.end(receive.job_id, failed=True)
    assert not scene.pool.held()


def test_all_ranks_have_to_end() -> None:
    scene, request = Scene(tp_size=2), receiver(60)
    scene.side.matched(request, 0)
    scene.side.allocated(request, list(range(1, 9)), 59)
    (receive,) = scene.step().receives
    scene.end(receive.job_id)
    assert scene.pool.held()
    scene.end(receive.job_id)
    assert not scene.pool.held()


def test_a_request_that_has_all_of_it_or_gets_it_elsewhere_says_so() -> None:
    scene, request = Scene(), receiver(65)
    assert scene.side.matched(request, 64) == (0, False)
    scene.side.allocated(request, list(range(1, 10)), 0)
    assert scene.step().dropped == (Handover("t", False, tuple(THEIRS)),)
    assert scene.side.matched(request, 0) == (0, False)
    scene.finish(request)
    assert scene.step().dropped == ()


def test_a_prompt_of_one_token_hands_nothing_over_on_either_side() -> None:
    scene = Scene()
    prefill, decode = sender(1), receiver(1)
    assert scene.side.matched(decode, 0) == (0, False)
    scene.side.allocated(decode, [1], 0)
    assert scene.side.matched(prefill, 0) == (0, False)
    assert scene.first_step(prefill, [2], scheduled=1) == PeerPlan()
    assert scene.finish(prefill) is not None
    scene.finish(decode)
    assert scene.step() == PeerPlan(idle=True)


@pytest.mark.parametrize("ever_asked", [True, False])
def test_aborted_before_it_had_blocks(ever_asked: bool) -> None:
    """Also where vLLM rejects a request, and makes one with another prompt only to tell of it."""
    scene, request = Scene(), receiver(1 if not ever_asked else 60)
    if ever_asked:
        scene.side.matched(request, 0)
    scene.finish(request, "FINISHED_ABORTED")
    assert scene.side.expects_ends()
    assert scene.step().dropped == (Handover("t", False, tuple(THEIRS)),)
    assert not scene.side.expects_ends()


def test_aborted_while_it_waits() -> None:
    """Its blocks stay held until the transfer is confirmed stopped."""
    scene, request = Scene(), receiver(60)
    scene.side.matched(request, 0)
    scene.side.allocated(request, list(range(1, 9)), 59)
    scene.finish(request, "FINISHED_ABORTED")
    plan = scene.step()
    assert plan.cancelled == (plan.receives[0].job_id,)
    assert scene.pool.held() == list(range(1, 9))
    scene.end(plan.cancelled[0], failed=True)
    assert not scene.pool.held()


@pytest.mark.parametrize(("num_tokens", "blocks"), [(58, 8), (59, 7), (43, 8), (60, 8), (67, 9)])
def test_where_vllm_loads_something_else_the_load_fails(num_tokens: int, blocks: int) -> None:
    """And with it all blocks that vLLM takes for filled then."""
    scene, request = Scene(), receiver(60)
    scene.side.matched(request, 0)
    scene.side.allocated(request, list(range(1, blocks + 1)), num_tokens)
    (receive,) = scene.step().receives
    assert (receive.handover is None) is (num_tokens != 43)
    skip = 2 if num_tokens == 43 else 0
    assert receive.block_ids == tuple(range(skip + 1, min(blocks, 8) + 1))


def test_a_request_that_may_not_read_caches_is_computed() -> None:
    scene, request = Scene(), receiver(60)
    request.skip_reading_prefix_cache = True
    assert scene.side.matched(request, 0) == (0, False)


# Sending


def test_sent_in_the_step_that_completes_the_prompt() -> None:
    scene, request = Scene(), sender(60)
    assert scene.side.matched(request, 0) == (0, False)
    scene.side.allocated(request, [1], 0)
    assert scene.first_step(request, [1, 2, 3, 4], scheduled=32).sends == ()
    assert scene.next_step(request, [5, 6], scheduled=16, computed=32).sends == ()
    (send,) = scene.next_step(request, [7, 8], scheduled=12, computed=48).sends
    assert send.block_ids == tuple(range(1, 9))
    assert send.handover == Handover("t", True, tuple(THEIRS))
    assert scene.finish(request) == {
        "transfer_id": "t",
        "do_remote_prefill": True,
        "remote_addresses": list(OWN[:1]),
    }
    assert scene.pool.held() == list(range(1, 9))
    assert scene.side.expects_ends()
    scene.end(send.job_id)
    assert not scene.pool.held()


def test_the_last_tokens_block_is_not_sent_where_it_is_alone_in_it() -> None:
    scene, request = Scene(), sender(33)
    scene.side.matched(request, 0)
    (send,) = scene.first_step(request, [1, 2, 3, 4, 5], scheduled=33).sends
    assert send.block_ids == (1, 2, 3, 4)


def test_with_an_own_prefix_hit_and_after_a_preemption() -> None:
    scene, request = Scene(), sender(60)
    scene.side.matched(request, 32)
    assert scene.first_step(request, [1, 2, 3, 4, 5], scheduled=8, computed=32).sends == ()
    # Preempted, and resumed with other blocks.
    resumed = Cached([request.request_id], [([11, 12, 13, 14, 15, 16, 17, 18],)], [32], {request.request_id})
    (send,) = scene.step(Output([], resumed, {request.request_id: 28})).sends
    assert send.block_ids == tuple(range(11, 19))
    # Preempted again, with the transfer under way: it is not sent twice.
    resumed = Cached([request.request_id], [([21, 22, 23, 24, 25, 26, 27, 28],)], [0], {request.request_id})
    assert scene.step(Output([], resumed, {request.request_id: 61})).sends == ()
    assert scene.pool.held() == list(range(11, 19))


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
def test_aborted_before_its_prompt_was_computed(status: str) -> None:
    scene, request = Scene(), sender(60)
    scene.side.matched(request, 0)
    scene.first_step(request, [1, 2, 3, 4], scheduled=32)
    assert scene.finish(request, status) is None
    assert scene.step().dropped == (Handover("t", True, tuple(THEIRS)),)
    assert scene.side.counters.take() == {"p2p_withdrawn": 1}


def test_aborted_while_it_is_sent() -> None:
    scene, request = Scene(), sender(60)
    scene.side.matched(request, 0)
    (send,) = scene.first_step(request, list(range(1, 9)), scheduled=60).sends
    assert scene.finish(request, "FINISHED_ABORTED") is None
    assert scene.step().cancelled == (send.job_id,)
    assert scene.pool.held()
    scene.end(send.job_id, failed=True)
    assert not scene.pool.held()


def test_without_addresses_the_decode_engine_has_to_ask() -> None:
    scene, request = Scene(), sender(60, remote_addresses=None)
    scene.side.matched(request, 0)
    scene.first_step(request, list(range(1, 9)), scheduled=60)
    params = scene.finish(request)
    assert params is not None
    assert params["ask"] is True


# Which requests take part


def test_a_second_live_request_with_an_id_is_refused_and_the_first_goes_on() -> None:
    scene, first, second = Scene(), receiver(60, "d1"), receiver(60, "d2")
    assert scene.side.matched(first, 0) == (59, True)
    assert scene.side.matched(second, 0) == (0, False)
    assert scene.finish(second) is None
    assert scene.step().dropped == ()
    scene.side.allocated(first, list(range(1, 9)), 59)
    (receive,) = scene.step().receives
    scene.finish(first, "FINISHED_ABORTED")
    assert scene.side.matched(receiver(60, "d3"), 0) == (0, False)  # still under way
    scene.end(receive.job_id)
    assert scene.side.matched(receiver(60, "d4"), 0) == (59, True)
    assert scene.side.counters.take()["p2p_refused"] == 2


def test_one_engine_may_be_both_ends_of_an_id() -> None:
    scene = Scene()
    assert scene.side.matched(sender(60), 0) == (0, False)
    assert scene.side.matched(receiver(60), 0) == (59, True)


def test_what_makes_no_sense_is_computed_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(receives=False)
    for name in "abc":
        request = receiver(60, name)
        assert scene.side.matched(request, 0) == (0, False)
        assert scene.finish(request) is None
    assert scene.step() == PeerPlan(idle=True)
    assert len(caplog.records) == 1
    assert scene.side.counters.take() == {"p2p_refused": 3}


def test_prompts_of_embeddings_are_not_handed_over() -> None:
    scene, request = Scene(), receiver(60)
    request.prompt_embeds = object()
    assert scene.side.matched(request, 0) == (0, False)


def test_nothing_happens_where_no_rank_has_an_engine() -> None:
    scene, request = Scene(), receiver(60)
    scene.side.own_addresses = ()
    assert scene.side.matched(request, 0) == (0, False)


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    scene = Scene()
    for number in range(50):
        ours, other = receiver(60, f"d{number}"), Request(f"r{number}", list(range(60)))
        for request in (ours, other):
            scene.side.matched(request, 0)
            scene.finish(request, "FINISHED_ABORTED")
    scene.step()
    assert not scene.side._states
    assert not scene.side._live
