"""What is loaded: never more than may be, once, and with every promise given back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from connectors.vllm_doubles import Block, Output, Request, Scene
from kvferry.connectors.vllm.keys import NotExpressible
from kvferry.connectors.vllm.plans import WorkReport
from kvferry.layout import KeyContext


def request(length: int, name: str = "r") -> Request:
    return Request(name, list(range(length)))


@pytest.mark.parametrize(
    ("length", "there", "local", "wanted"),
    [
        (512, 512, 0, (511, True)),  # the last token is computed, whatever there is
        (513, 512, 0, (512, True)),
        (512, 64, 16, (48, True)),
        (512, 64, 64, (0, False)),
        (512, 64, 128, (0, False)),  # never negative
        (512, 512, 504, (0, False)),  # less than a block is not worth a load
        (512, 512, 496, (15, True)),
        (64, 64, 0, (63, True)),
        (63, 64, 0, (0, False)),
        (1, 0, 0, (0, False)),
        (512, 0, 0, (0, False)),
    ],
)
def test_how_many_tokens_are_offered(length: int, there: int, local: int, wanted: tuple[int, bool]) -> None:
    scene = Scene()
    scene.server.there = there
    assert scene.side.matched(request(length), local) == wanted
    assert bool(scene.server.leases) is wanted[1]  # who loads nothing holds no promise


def test_asking_again_changes_nothing() -> None:
    scene, prompt = Scene(), request(512)
    scene.server.there = 256
    answers = {scene.side.matched(prompt, 16) for _ in range(34)}
    assert answers == {(240, True)}
    assert len(scene.server.leases) == len(scene.server.asked) == 1
    scene.clock.now += 1
    scene.server.there = 320
    assert scene.side.matched(prompt, 16) == (304, True)  # not asked for the last time long ago
    scene.side.finished(prompt)  # never admitted
    assert not scene.server.leases
    assert scene.server.forgotten == ["request-1"]


def test_a_load_from_query_to_end() -> None:
    """Query, query, allocation, end, query: one load, one promise, and the blocks are held meanwhile."""
    scene, prompt = Scene(), request(128)
    scene.server.there = 128
    scene.side.matched(prompt, 16)
    scene.side.matched(prompt, 16)
    scene.side.allocated(prompt, list(range(1, 17)), 111)
    (load,) = scene.side.plan(Output()).loads
    assert (load.block_ids, load.skip_blocks, load.target_ids) == (tuple(range(1, 17)), 2, tuple(range(3, 17)))
    assert scene.pool.held() == list(range(3, 17))
    assert scene.side.matched(prompt, 16) == (None, False)
    assert scene.side.plan(Output()).loads == ()

    scene.end(load.job_id)
    assert not scene.pool.held()
    scene.side.allocated(prompt, list(range(1, 17)), 0)  # vLLM calls again, with nothing to load
    assert scene.side.plan(Output()).loads == ()
    assert scene.side.matched(prompt, 16) == (111, True)  # preempted, and asked anew


def test_all_ranks_must_end_and_one_failure_counts() -> None:
    scene, prompt = Scene(world_size=2), request(128)
    scene.server.there = 128
    scene.side.matched(prompt, 0)
    scene.side.allocated(prompt, list(range(1, 17)), 127)
    (load,) = scene.side.plan(Output()).loads
    scene.end(load.job_id, failed=True)
    assert scene.pool.held() == list(range(1, 17))
    scene.end(load.job_id)
    assert not scene.pool.held()
    assert not scene.server.leases
    assert scene.side.matched(prompt, 0) == (0, False)  # an equal answer would fail for ever


def test_an_aborted_load_is_still_planned_and_holds_its_blocks() -> None:
    """vLLM keeps the blocks of an aborted request until its load is reported, so a worker has to hear of it."""
    scene, prompt = Scene(), request(128)
    scene.server.there = 128
    scene.side.matched(prompt, 0)
    scene.side.allocated(prompt, list(range(1, 17)), 127)
    scene.side.finished(prompt)
    (load,) = scene.side.plan(Output()).loads
    assert scene.pool.held()
    scene.end(load.job_id)
    assert not scene.pool.held()


def test_a_load_that_was_given_up_frees_the_request_but_not_the_blocks() -> None:
    scene, prompt = Scene(), request(128)
    scene.server.there = 128
    scene.side.matched(prompt, 0)
    scene.side.allocated(prompt, list(range(1, 17)), 127)
    (load,) = scene.side.plan(Output()).loads
    scene.side.ended(WorkReport(dropped={"r"}))
    assert scene.side.matched(prompt, 0) == (0, False)
    assert scene.pool.held() == list(range(1, 17))
    scene.end(load.job_id, failed=True)
    assert not scene.pool.held()


def test_waiting_for_lower_tiers_has_an_end() -> None:
    scene, prompt = Scene(disk_wait_s=1.0), request(512)
    scene.server.there, scene.server.coming = 64, 256
    assert scene.side.matched(prompt, 0) == (None, False)
    assert scene.side.matched(prompt, 0) == (None, False)
    assert len(scene.server.asked) == 1  # not at every step
    scene.clock.now += 0.5
    assert scene.side.matched(prompt, 0) == (None, False)
    scene.clock.now += 0.6
    assert scene.side.matched(prompt, 0) == (64, True)


def test_it_waits_no_longer_than_something_is_coming() -> None:
    scene, prompt = Scene(), request(512)
    scene.server.there, scene.server.coming = 64, 256
    assert scene.side.matched(prompt, 0) == (None, False)
    scene.server.there, scene.server.coming = 320, 0
    scene.clock.now += 0.01
    assert scene.side.matched(prompt, 0) == (320, True)


def test_an_answer_that_takes_its_time() -> None:
    scene, prompt = Scene(), request(512)
    scene.server.there, scene.server.slow = 256, True
    assert scene.side.matched(prompt, 0) == (None, False)
    scene.server.slow = False
    assert scene.side.matched(prompt, 0) == (None, False)  # not at every step
    scene.clock.now += 0.01
    assert scene.side.matched(prompt, 0) == (256, True)


def test_a_request_that_ends_before_its_answer_came() -> None:
    scene, prompt = Scene(), request(512)
    scene.server.slow = True
    assert scene.side.matched(prompt, 0) == (None, False)
    scene.side.finished(prompt)
    assert scene.server.withdrawn == scene.server.forgotten == ["request-1"]


def test_another_connector_loads() -> None:
    """Under MultiConnector every child is asked, and one of them loads."""
    scene, prompt = Scene(), request(512)
    scene.server.there = 256
    scene.side.matched(prompt, 0)
    scene.side.allocated(prompt, list(range(1, 65)), 0)
    assert not scene.server.leases
    assert scene.side.plan(Output()).loads == ()


def test_vllm_wants_less_than_was_promised() -> None:
    scene, prompt = Scene(), request(512)
    scene.server.there = 256
    scene.side.matched(prompt, 0)
    scene.side.allocated(prompt, list(range(1, 65)), 248)
    (load,) = scene.side.plan(Output()).loads
    assert load.lease_id == 0  # which a worker fails
    assert not scene.server.leases


def test_who_may_not_read_caches_is_not_asked_for() -> None:
    scene, prompt = Scene(), request(512)
    scene.server.there = 256
    prompt.skip_reading_prefix_cache = True
    assert scene.side.matched(prompt, 0) == (0, False)
    assert not scene.server.asked


def test_a_producer_loads_nothing() -> None:
    scene = Scene(loads=False)
    scene.server.there = 256
    assert scene.side.matched(request(512), 0) == (0, False)


def test_what_no_key_expresses_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.server.there = 256

    def context_of(request: Request, epoch: str) -> KeyContext:
        raise NotExpressible("prompt embeddings")

    scene.side._context_of = context_of
    for name in ("a", "b"):
        prompt = request(512, name)
        assert scene.side.matched(prompt, 0) == (0, False)
        assert scene.first_step(prompt, scheduled=512, blocks=range(1, 65)).stores == ()
    assert scene.side.counters.take()["unkeyed_requests"] == 2
    assert caplog.text.count("prompt embeddings") == 1


def test_a_resumed_request_is_asked_for_with_its_generated_tokens() -> None:
    scene, prompt = Scene(), request(100)
    prompt.output_token_ids = list(range(30))
    scene.side.matched(prompt, 0)
    assert scene.server.asked[0][1] == 130


def test_after_a_reset_all_keys_are_new() -> None:
    scene, prompt = Scene(), request(128)
    scene.server.there = 128
    scene.side.matched(prompt, 0)
    assert scene.side.reset()
    assert not scene.server.leases
    scene.side.matched(prompt, 0)
    before, after = (asked[2] for asked in scene.server.asked)
    assert before == KeyContext()
    assert after.salt
    scene.side.allocated(prompt, list(range(1, 17)), 127)


def test_after_a_reset_during_a_load_nothing_is_shared_either() -> None:
    """It has failed, and may be all that is known of new weights: what comes later is not stored as if of the old."""
    scene, loads, other = Scene(), request(128), Request("other", list(range(64)))
    scene.server.there = 128
    scene.side.matched(loads, 0)
    scene.side.allocated(loads, list(range(1, 17)), 127)
    assert not scene.side.reset()
    scene.server.there = 0
    scene.side.matched(other, 0)
    assert scene.server.asked[-1][2].salt
    scene.side.allocated(other, [], 0)
    plan = scene.first_step(other, scheduled=64, blocks=range(20, 28))
    assert plan.stores == ()
    scene.end(plan.loads[0].job_id)
    assert scene.side.reset()
    assert len(scene.first_step(other, scheduled=64, blocks=range(20, 28)).stores) == 1


def test_nothing_is_stored_after_a_reset_that_vllm_could_not_make() -> None:
    """A block in use keeps vLLM's own prefix cache as it was: new requests may get KV of before from it."""
    scene, prompt = Scene(), request(256)
    scene.pool.blocks[0] = Block(0, ref_cnt=1, is_null=True)
    held = scene.pool.blocks[40:41]
    scene.pool.touch(held)
    assert scene.side.reset()
    scene.side.matched(prompt, 64)
    scene.side.allocated(prompt, [], 0)
    assert scene.first_step(prompt, computed=64, scheduled=64, blocks=range(1, 17)).stores == ()
    scene.pool.free_blocks(held)
    assert scene.side.reset()
    (stored,) = scene.first_step(prompt, scheduled=128, blocks=range(1, 17)).stores
    assert stored.start_token == 0
    assert stored.context.salt


def test_a_session_that_goes_on_with_a_picture_has_other_keys() -> None:
    scene = Scene()
    scene.side._context_of = lambda request, epoch: KeyContext(
        multimodal=tuple(feature.identifier for feature in request.mm_features)
    )
    prompt = request(64)
    scene.side.matched(prompt, 0)
    scene.side.allocated(prompt, [], 0)
    assert scene.first_step(prompt, scheduled=64, blocks=range(8)).stores[0].context == KeyContext()
    prompt.mm_features.append(SimpleNamespace(identifier="cat"))
    assert prompt.prompt_token_ids is not None
    prompt.prompt_token_ids += [7] * 64
    (store,) = scene.first_step(prompt, computed=64, scheduled=64, blocks=range(16)).stores
    assert store.context == KeyContext(multimodal=("cat",))
    assert store.start_token == 0
    scene.side.matched(prompt, 0)
    assert scene.server.asked[-1][2] == store.context
