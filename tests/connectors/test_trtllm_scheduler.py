"""The scheduler's side of TensorRT-LLM's connector on its own: what it plans, and what it forgets."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from doubles.trt_interface import RequestData, SchedulerOutput
from doubles.trt_requests import Request
from kvferry.client import Lookup
from kvferry.connectors.trtllm.requests import NotExpressible, context_of, targets
from kvferry.connectors.trtllm.scheduler import FORGOTTEN_S, RENEWED_S, UNUSED_S, SchedulerRules, SchedulerSide
from kvferry.errors import KVFerryError
from kvferry.layout import KeyContext

PROMPT = list(range(200))


class Server:
    """Promises: whole chunks of 64 up to `has`."""

    def __init__(self, has: int = 192) -> None:
        self.has = has
        self.usable = True
        self.leases: dict[str, tuple[int, int]] = {}
        self.released: list[int] = []
        self._last = 0

    def lookup(self, name: str, tokens: array[int], context: KeyContext) -> Lookup:
        found = min(self.has, len(tokens) // 64 * 64)
        if not found:
            return Lookup(0, 0)
        self._last += 1
        self.leases[name] = (self._last, found)
        return Lookup(found, self._last)

    def release(self, lease_id: int) -> None:
        if lease_id:
            self.released.append(lease_id)

    def forget(self, name: str) -> None:
        self.leases.pop(name, None)

    def close(self) -> None: ...


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def side_of(server: Server, clock: Clock | None = None, block_size: int = 32) -> SchedulerSide:
    return SchedulerSide(SchedulerRules(block_size, 64), server, clock=clock or Clock())  # type: ignore[arg-type]


def first(position: int, count: int, blocks: list[int], **fields: Any) -> SchedulerOutput:
    return SchedulerOutput([RequestData(1, PROMPT, blocks, position, count, **fields)], [])


def later(position: int, count: int, blocks: list[int], **fields: Any) -> SchedulerOutput:
    return SchedulerOutput([], [RequestData(1, [], blocks, position, count, **fields)])


def test_a_load_and_the_store_of_the_rest() -> None:
    server = Server(128)
    side = side_of(server)
    assert side.matched(Request(1, PROMPT), 32) == 96
    blocks = [9, 8, 7, 6, 5, 4, 3]
    side.allocated(1, blocks)
    plan = side.plan(first(32, 72, blocks))  # the position leaves out what is loaded
    (load,), (store,) = plan.loads, plan.stores
    assert (load.block_ids, load.skip_tokens, load.lease_id) == ((9, 8, 7, 6), 32, 1)
    assert (store.start_token, store.block_ids, len(store.tokens)) == (128, tuple(blocks[:6]), 192 * 4)
    assert plan.going_on == frozenset()
    again = side.plan(later(200, 1, [2]))
    assert (again.loads, again.stores, again.going_on) == ((), (), frozenset({1}))
    assert side.finished(1)
    assert not side.finished(1)


def test_only_what_a_step_completes_is_stored() -> None:
    side = side_of(Server(0))
    side.matched(Request(1, PROMPT), 0)
    blocks = list(range(7))
    assert side.plan(first(0, 63, blocks)).stores == ()
    assert [store.start_token for store in side.plan(later(63, 1, [])).stores] == [0]
    assert side.plan(later(64, 63, [])).stores == ()
    (store,) = side.plan(later(127, 73, [])).stores
    assert (store.start_token, len(store.tokens)) == (64, 192 * 4)
    assert side.plan(later(500, 1, [7])).stores == ()  # what was generated is not kept


def test_nothing_is_stored_for_a_server_that_is_away_and_all_when_it_is_back() -> None:
    server = Server(0)
    side = side_of(server)
    side.matched(Request(1, PROMPT), 0)
    server.usable = False
    assert side.plan(first(0, 200, list(range(7)))).stores == ()
    assert not side.finished(1)
    side.matched(Request(1, PROMPT), 0)
    side.plan(first(0, 200, list(range(7))))
    server.usable = True
    assert len(side.plan(later(200, 1, [])).stores) == 1


def test_promises_that_are_not_used_are_given_back() -> None:
    server = Server(192)
    side = side_of(server)
    side.matched(Request(1, PROMPT), 0)
    assert not side.finished(1)  # cancelled before its first step
    assert (server.released, server.leases) == ([1], {})
    assert side.matched(Request(2, PROMPT), 192) == 0  # the engine has all of it
    side.matched(Request(3, PROMPT), 0)
    side.matched(Request(3, PROMPT), 0)  # a replay that nobody told of
    assert server.released == [1, 2]
    side.cancel_load(3, 0, 192)
    plan = side.plan(SchedulerOutput([RequestData(3, PROMPT, list(range(7)), 0, 200)]))
    assert plan.loads == ()
    assert server.released == [1, 2, 3]


def test_a_load_that_is_cut_short() -> None:
    """The promise is cut to whole chunks, whose blocks are the request's own; what was cut is computed anyway."""
    server = Server(192)
    side = side_of(server)
    assert side.matched(Request(1, PROMPT), 0) == 192
    side.cancel_load(1, 96, 192)
    (load,) = side.plan(first(0, 104, list(range(7)))).loads
    assert (load.lease_id, load.block_ids) == (2, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("cancelled", "blocks"),
    [
        ([(0, 64)], (1, 3)),
        ([(0, 96), (160, 192)], (1, 3)),
        ([(160, 192), (0, 64)], (1, 3)),
        ([(64, 128), (128, 200)], (0, 2)),  # more than is wanted, of what is right
        ([(0, 200)], None),
        ([(0, 40)], (0, 3)),  # all of a block, of which the engine has a part
        ([(64, 64), (96, 128)], (0, 3)),
    ],
)
def test_either_end_of_a_promise_is_given_up(cancelled: list[tuple[int, int]], blocks: tuple[int, int] | None) -> None:
    """Where the engine has the beginning itself by now it counts on the rest all the same."""
    server = Server(192)
    side = side_of(server, block_size=64)
    assert side.matched(Request(1, PROMPT), 0) == 192
    for start, end in cancelled:
        side.cancel_load(1, start, end)
    local = max((end for start, end in cancelled if not start), default=0)
    plan = side.plan(first(min(local, 192), 8, [9, 8, 7, 6]))
    if blocks is None:
        assert (plan.loads, server.released) == ((), [1])
    else:
        begin, end = blocks
        (load,) = plan.loads
        assert (load.skip_tokens, load.block_ids) == (begin * 64, (9, 8, 7)[:end])


def test_what_the_engine_has_lost_meanwhile_is_loaded_too() -> None:
    side = side_of(Server(192), block_size=64)
    assert side.matched(Request(1, PROMPT), 128) == 64
    (load,) = side.plan(first(64, 8, [9, 8, 7, 6])).loads
    assert (load.skip_tokens, load.block_ids) == (64, (9, 8, 7))


def test_fewer_pages_than_were_promised() -> None:
    server = Server(192)
    side = side_of(server, block_size=64)
    assert side.matched(Request(1, PROMPT), 0) == 192
    plan = side.plan(first(0, 64, [5, 4], new_block_ids_by_layer_group=[[5, 4]]))
    assert [(load.lease_id, load.block_ids) for load in plan.loads] == [(2, (5, 4))]
    assert plan.stores == ()  # which of them are computed is not known yet
    plan = side.plan(later(128, 72, [3, 2], new_block_ids_by_layer_group=[[3, 2]]))
    assert plan.stores == ()  # it was promised, and so is there
    server.has = 64
    side.matched(Request(1, PROMPT), 0)
    side._states[1].promise = Lookup(192, 7)
    side._states[1].wanted_tokens = 192
    with pytest.raises(KVFerryError, match="no longer there"):
        side.plan(first(0, 64, [5, 4], new_block_ids_by_layer_group=[[5, 4]]))


def test_what_a_promise_with_pages_for_one_chunk_has_completed_is_not_known_yet() -> None:
    """Whether a release tells pages by group, or not: what is stored too early is wrong KV."""
    side = side_of(Server(64), block_size=64)
    assert side.matched(Request(1, PROMPT), 0) == 64
    plan = side.plan(first(0, 64, [5, 4, 3]))  # of the promise, nothing is used
    assert (len(plan.loads), plan.stores) == (1, ())
    (store,) = side.plan(later(64, 64, [])).stores
    assert (store.start_token, len(store.tokens)) == (64, 128 * 4)


def test_blocks_without_a_page() -> None:
    assert targets([-1, -1, 5, 6, 7], 4, 0) == ((0, 0, 5, 6), 2)
    assert targets([-1, 4, 5], 3, 1) == ((0, 4, 5), 1)
    assert targets([3, 4, -1], 3, 1) is None
    assert targets([3, 4, -1], 2, 1) == ((3, 4), 1)
    side = side_of(Server(192), block_size=64)
    side.matched(Request(1, PROMPT), 0)
    with pytest.raises(KVFerryError, match="has blocks"):
        side.plan(first(0, 8, [3, -1, 4, 5]))
    side = side_of(Server(0), block_size=64)
    side.matched(Request(1, PROMPT), 0)
    (store,) = side.plan(first(0, 200, [3, -1, 4, 5])).stores
    assert (store.block_ids, len(store.tokens)) == ((3,), 64 * 4)  # the chunk after the gap could not be found again
    assert side.plan(later(200, 1, [])).stores == ()


def test_pages_of_several_groups_are_refused() -> None:
    side = side_of(Server(0))
    side.matched(Request(1, PROMPT), 0)
    with pytest.raises(KVFerryError, match="2 layer groups"):
        side.plan(first(0, 200, [], new_block_ids_by_layer_group=[[1], [2]]))


def test_requests_that_end_without_a_word_are_forgotten() -> None:
    server, clock = Server(192), Clock()
    side = side_of(server, clock)
    side.matched(Request(1, PROMPT), 0)
    side.matched(Request(2, PROMPT), 0)
    side.cancel_load(2, 0, 192)
    clock.now = FORGOTTEN_S - 1
    side.plan(first(0, 8, list(range(7))))
    assert len(side) == 2
    clock.now = FORGOTTEN_S + FORGOTTEN_S / 5
    side.plan(later(200, 1, []))
    assert len(side) == 1
    assert server.released == [2]


def test_a_promise_to_a_request_that_waits_is_kept_up() -> None:
    server, clock = Server(192), Clock()
    side = side_of(server, clock)
    side.matched(Request(1, PROMPT), 0)
    for _ in range(40):
        clock.now += RENEWED_S / 2 + 1
        side.plan(SchedulerOutput())
    assert server.leases["request-1"][0] > 5
    server.has = 64  # what is promised is the server's to keep
    clock.now += RENEWED_S + 1
    side.plan(SchedulerOutput())
    server.has = 192
    kept = side._states[1].promise
    (load,) = side.plan(first(0, 8, list(range(7)))).loads
    assert (load.lease_id, kept.tokens) == (kept.lease_id, 192)


def test_a_request_that_begins_when_its_promise_is_gone_ends_the_engine() -> None:
    """Its blocks would be taken for filled."""
    server, clock = Server(192), Clock()
    side = side_of(server, clock)
    side.matched(Request(1, PROMPT), 0)
    clock.now = UNUSED_S + 1
    side.plan(SchedulerOutput())
    assert (len(side), server.leases) == (0, {})
    with pytest.raises(KVFerryError, match="request 1 begins more than 3600 s after"):
        side.plan(first(0, 8, list(range(7))))
    side.matched(Request(1, PROMPT), 0)  # another one of that number
    assert len(side.plan(first(0, 8, list(range(7)))).loads) == 1


def test_requests_that_nobody_asked_for_are_left_alone() -> None:
    assert side_of(Server()).plan(first(0, 200, list(range(7)))).stores == ()


@pytest.mark.parametrize(
    "fields", [{"lora_task_id": 0}, {"multimodal_hashes": [[1]]}, {"prompt_embedding_table": lambda: 3}]
)
def test_what_no_key_can_express(fields: dict[str, Any]) -> None:
    request = Request(1, PROMPT)
    for name, value in fields.items():
        setattr(request, name, value)
    with pytest.raises(NotExpressible):
        context_of(request)
    side = side_of(Server(192))
    assert side.matched(request, 0) == 0
    assert side.plan(first(0, 200, list(range(7)))).stores == ()


def test_salts_are_in_the_key() -> None:
    request = Request(1, PROMPT, multimodal_hashes=[])
    assert context_of(request) == KeyContext()
    request.cache_salt_id = 0
    assert context_of(request).salt
    other = Request(2, PROMPT, cache_salt_id=1)
    assert context_of(other) != context_of(request)
