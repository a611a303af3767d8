"""What is stored: whole chunks of known tokens, each once, with their blocks kept until the server has read them."""

from __future__ import annotations

import pytest

from connectors.vllm_doubles import Cached, Output, Request, Scene
from kvferry.connectors.vllm.plans import StorePlan
from kvferry.connectors.vllm.scheduler import STUCK_S


def request(length: int, name: str = "r") -> Request:
    return Request(name, list(range(length)))


def only(stores: tuple[StorePlan, ...]) -> StorePlan:
    (store,) = stores
    return store


def test_chunks_are_stored_as_they_become_whole() -> None:
    scene, prompt = Scene(), request(200)
    scene.side.matched(prompt, 0)
    first = only(scene.first_step(prompt, scheduled=100, blocks=range(1, 14)).stores)
    assert (len(first.tokens) // 4, first.start_token, first.block_ids) == (64, 0, tuple(range(1, 9)))
    assert scene.next_step(prompt, computed=100, scheduled=20, new_blocks=[20, 21]).stores == ()
    second = only(scene.next_step(prompt, computed=120, scheduled=80, new_blocks=range(30, 40)).stores)
    assert (len(second.tokens) // 4, second.start_token) == (192, 64)
    assert second.block_ids == (*range(1, 14), 20, 21, *range(30, 39))
    assert scene.pool.held() == [*range(1, 14), 20, 21, *range(30, 39)]
    scene.end(first.job_id, second.job_id)
    assert not scene.pool.held()


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128])
def test_only_whole_chunks(length: int) -> None:
    scene, prompt = Scene(), request(length)
    scene.side.matched(prompt, 0)
    stores = scene.first_step(prompt, scheduled=length, blocks=range(1, 17)).stores
    assert [len(store.tokens) // 4 for store in stores] == ([length - length % 64] if length >= 64 else [])


def test_scheduled_placeholders_are_not_computed_tokens() -> None:
    """Asynchronous scheduling: 260 tokens count as computed, 5 of them are not known yet; with chunks of 256, none."""
    scene, prompt = Scene(store_generated=True), request(50)
    prompt.output_token_ids = list(range(77))  # 127 known tokens: one short of the second chunk
    scene.side.matched(prompt, 0)
    store = only(scene.first_step(prompt, computed=131, scheduled=1, blocks=range(1, 20)).stores)
    assert len(store.tokens) // 4 == 64


def test_generated_tokens_are_kept_only_where_asked() -> None:
    for generated, wanted in ((False, 64), (True, 128)):
        scene, prompt = Scene(store_generated=generated), request(100)
        prompt.output_token_ids = list(range(40))
        scene.side.matched(prompt, 0)
        store = only(scene.first_step(prompt, computed=139, scheduled=1, blocks=range(1, 20)).stores)
        assert len(store.tokens) // 4 == wanted


def test_what_the_server_has_is_not_stored_again() -> None:
    scene, prompt = Scene(), request(300)
    scene.server.there = 128
    scene.side.matched(prompt, 0)
    scene.side.allocated(prompt, list(range(1, 39)), 128)
    (load,) = scene.side.plan(Output()).loads
    scene.end(load.job_id)
    store = only(scene.first_step(prompt, computed=128, scheduled=172, blocks=range(1, 39)).stores)
    assert (store.start_token, len(store.tokens) // 4) == (128, 256)
    assert scene.pool.held() == list(range(17, 33))


def test_after_a_failed_load_all_is_stored() -> None:
    """The server drops a chunk that it could not deliver, so it is wanted again."""
    scene, prompt = Scene(), request(300)
    scene.server.there = 256
    scene.side.matched(prompt, 0)
    scene.side.allocated(prompt, list(range(1, 39)), 256)
    (load,) = scene.side.plan(Output()).loads
    scene.end(load.job_id, failed=True)
    store = only(scene.first_step(prompt, computed=128, scheduled=172, blocks=range(1, 39)).stores)
    assert store.start_token == 0


def test_a_preempted_requests_blocks_are_not_reused_before_they_were_read() -> None:
    scene, prompt = Scene(), request(128)
    scene.side.matched(prompt, 0)
    for block in scene.pool.blocks[1:17]:
        block.ref_cnt = 1  # the request's own reference
    first = only(scene.first_step(prompt, scheduled=64, blocks=range(1, 17)).stores)
    assert not scene.side.frees_soon()
    scene.pool.free_blocks(scene.pool.blocks[1:17])  # preempted
    assert scene.pool.held() == list(range(1, 9))
    assert scene.side.frees_soon()

    scene.side.matched(prompt, 0)
    cached = Cached(["r"], [(list(range(20, 36)),)], [0], {"r"})
    again = only(scene.side.plan(Output([], cached, {"r": 128})).stores)  # resumed: its blocks are others
    assert again.block_ids == tuple(range(20, 36))
    scene.end(first.job_id, again.job_id)
    assert not scene.pool.held()


def test_stores_never_hold_more_than_a_share_of_the_cache() -> None:
    scene = Scene(num_blocks=64)  # of which stores may hold 16
    prompts = [request(128, name) for name in ("a", "b")]
    for prompt in prompts:
        scene.side.matched(prompt, 0)
    first = only(scene.first_step(prompts[0], scheduled=128, blocks=range(1, 17)).stores)
    assert scene.first_step(prompts[1], scheduled=128, blocks=range(17, 33)).stores == ()
    scene.end(first.job_id)
    assert only(scene.next_step(prompts[1], computed=128, scheduled=1).stores).block_ids == tuple(range(17, 33))


def test_a_server_that_does_not_end_a_store_is_given_no_other() -> None:
    scene = Scene()
    prompts = [request(64, name) for name in "ab"]
    for prompt in prompts:
        scene.side.matched(prompt, 0)
    first = only(scene.first_step(prompts[0], scheduled=64, blocks=range(1, 9)).stores)
    scene.clock.now += STUCK_S + 1
    assert scene.first_step(prompts[1], scheduled=64, blocks=range(11, 19)).stores == ()
    scene.end(first.job_id)
    assert only(scene.next_step(prompts[1], computed=64, scheduled=1).stores).block_ids == tuple(range(11, 19))


def test_one_store_may_hold_more() -> None:
    scene, prompt = Scene(num_blocks=64), request(448)
    scene.side.matched(prompt, 0)
    assert len(only(scene.first_step(prompt, scheduled=448, blocks=range(1, 57)).stores).block_ids) == 56


def test_a_failed_store_is_not_tried_again_at_every_step() -> None:
    scene, prompt = Scene(), request(200)
    scene.side.matched(prompt, 0)
    store = only(scene.first_step(prompt, scheduled=100, blocks=range(1, 26)).stores)
    scene.end(store.job_id, failed=True)
    assert scene.next_step(prompt, computed=100, scheduled=100).stores == ()


def test_a_server_that_is_gone_is_given_nothing() -> None:
    scene, prompt = Scene(), request(200)
    scene.server.usable = False
    scene.side.matched(prompt, 0)
    assert scene.first_step(prompt, scheduled=200, blocks=range(1, 26)).stores == ()
    assert not scene.pool.held()


def test_a_consumer_stores_nothing() -> None:
    scene, prompt = Scene(stores=False), request(200)
    scene.side.matched(prompt, 0)
    assert scene.first_step(prompt, scheduled=200, blocks=range(1, 26)).stores == ()


def test_stepping_is_asked_for_while_jobs_go_on_but_not_for_ever() -> None:
    scene, prompt = Scene(), request(200)
    scene.side.matched(prompt, 0)
    assert not scene.side.expects_ends()
    scene.first_step(prompt, scheduled=200, blocks=range(1, 26))
    assert scene.side.expects_ends()
    scene.clock.now += 60  # a frozen server
    assert not scene.side.expects_ends()
    assert not scene.side.frees_soon()
