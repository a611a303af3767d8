"""The double's rules: what it allows goes well, and a connector that breaks one is caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from unittest import mock

import pytest

from doubles import trt_mutants
from doubles.trt_blocks import PoolShape, RuleBroken, WrongKV
from doubles.trt_executor import EngineDead, FakeTrtExecutor
from doubles.trt_fixtures import Start, thaw, wait_for_memory
from doubles.trt_mutants import Pair
from doubles.trt_requests import Setup, State
from kvferry.errors import KVFerryError, RequestError
from serving.process import Stage, freeze

PROMPT = list(range(1000, 1200))
KEEPS_NOTHING = Setup(keeps=False)
V2 = Setup(v2=True, keeps=False, shape=PoolShape(blocks=14, tokens=64))
OURS: Pair = (None, None)
Warm = Callable[..., FakeTrtExecutor]


@pytest.fixture
def warm(start: Start) -> Warm:
    """An engine of a mutated connector, on a server that has the prompt's KV."""

    def make(mutant: Pair, setup: Setup = KEEPS_NOTHING, prompt: list[int] = PROMPT) -> FakeTrtExecutor:
        before = start(dataclasses.replace(setup, holes=0, partial=False, repeats_hooks=False))
        before.run(prompt)
        before.close()
        return start(setup, scheduler=mutant[0], worker=mutant[1])

    return make


@pytest.fixture
def frozen(stage: Stage) -> Iterator[Callable[[bool], None]]:
    """Stops the server's process, or lets it go on."""

    yield lambda stop: (freeze if stop else thaw)(stage.server.pid)
    thaw(stage.server.pid)


def wait_for_stores(engine: FakeTrtExecutor) -> None:
    for store in engine.workers[0]._side._stores:
        store.job.wait(10)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda request, local, promised: (promised + 1, False), "no whole blocks"),
        (lambda request, local, promised: (request.prompt_len - local, False), "whole blocks|leave none"),
        (lambda request, local, promised: (0, True), "load of nothing"),
        (lambda request, local, promised: promised, "the answer to a query is 192"),
        (lambda request, local, promised: (None, False), r"the answer to a query is \(None"),
        (lambda request, local, promised: (-32, False), "the answer to a query is"),
    ],
)
def test_answers_that_are_not_allowed(warm: Warm, change: Callable[..., object], text: str) -> None:
    with pytest.raises(RuleBroken, match=text):
        warm(trt_mutants.answering(change)).run(PROMPT)


def test_a_promise_up_to_the_last_token(warm: Warm) -> None:
    mutant = trt_mutants.answering(lambda request, local, promised: (request.prompt_len - local, False))
    with pytest.raises(RuleBroken, match="leave none of 192"):
        warm(mutant).run(PROMPT[:192])


def test_promises_after_a_part_of_a_block(warm: Warm) -> None:
    """Ours gives none there."""
    setup = Setup(partial=True)
    other = [*PROMPT[:40], *range(5000, 5100)]
    engine = warm(trt_mutants.answering(lambda request, local, promised: (promised, False)), setup, other)
    engine.run(PROMPT)
    (request,) = engine.run(other)
    assert (request.local, request.matched) == (40, 0)
    engine = warm(trt_mutants.answering(lambda request, local, promised: (64, False)), setup, other)
    with pytest.raises((RuleBroken, EngineDead)):
        engine.run(PROMPT, other)


@pytest.mark.parametrize(("mutant", "chunk"), [(trt_mutants.saving_too_early, 64), (trt_mutants.saving_what_comes, 32)])
def test_an_engine_is_caught_that_saves_what_is_not_computed(
    start: Start, mutant: Callable[[], Pair], chunk: int
) -> None:
    """All blocks after the first chunk, or a chunk's before its end."""
    scheduler, worker = mutant()
    engine = start(dataclasses.replace(KEEPS_NOTHING, max_tokens=chunk), scheduler=scheduler, worker=worker)
    engine.submit(PROMPT)
    engine.step()
    wait_for_stores(engine)
    engine.close()
    with pytest.raises(WrongKV, match=f"token {chunk}, .* poison"):
        start().run(PROMPT)


@pytest.mark.parametrize("mutant", [None, trt_mutants.giving_blocks_back, trt_mutants.ending_saves_at_once])
def test_blocks_that_are_given_back_while_they_are_saved(
    start: Start, frozen: Callable[[bool], None], mutant: Callable[[], Pair] | None
) -> None:
    """Ours has them kept until the server has read them; connectors that do not are caught."""
    scheduler, worker = (None, None) if mutant is None else mutant()
    engine = start(dataclasses.replace(KEEPS_NOTHING, max_tokens=64), scheduler=scheduler, worker=worker)
    request = engine.submit(PROMPT)
    engine.step()
    wait_for_stores(engine)
    frozen(True)
    while request.state not in (State.SAVING, State.ENDED):
        engine.step()
    for _ in range(3):
        engine.step()
    assert request.state is (State.SAVING if mutant is None else State.ENDED)
    stores = [store.job for store in engine.workers[0]._side._stores]
    frozen(False)
    engine.finish(request)
    for job in stores:
        job.wait(10)
    engine.close()
    if mutant is None:
        assert start().run(PROMPT)[0].matched == 192
    else:
        with pytest.raises(WrongKV, match="poison"):
            start().run(PROMPT)


@pytest.mark.parametrize("partial", [False, True])
def test_requests_that_are_cancelled_without_a_word_leave_no_wrong_kv(
    start: Start, frozen: Callable[[bool], None], partial: bool
) -> None:
    """Nothing is overwritten that the server still reads: the engine waits for it.

    Where blocks are copied for partial reuse, before any forward, it waits in the same step.
    """
    engine = start(dataclasses.replace(KEEPS_NOTHING, partial=partial, max_tokens=64))
    request = engine.submit(PROMPT)
    other = engine.submit([7] * 20, max_new=40)
    engine.step()
    frozen(True)
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(engine.step)
        if not partial:
            step.result(20)
            engine.cancel(request, silently=True)
            step = thread.submit(engine.step)
        with pytest.raises(NotYet):
            step.result(0.3)
        frozen(False)
        step.result(20)
    if partial:
        engine.cancel(request, silently=True)
    engine.finish(other)
    assert engine.workers[0]._side._stores == []
    assert len(engine.scheduler._side) == 1  # which time ends
    assert start().run(PROMPT)[0].matched == 128


def test_a_load_that_failed_ends_the_engine(start: Start, warm: Warm, stage: Stage) -> None:
    """The server dies between promise and load. Ours never returns; one that does reads other KV."""
    ours = trt_mutants.answering(lambda request, local, promised: (promised, False))
    for mutant, outcome in [(ours, EngineDead), (trt_mutants.returning_from_failed_loads(), WrongKV)]:
        engine = warm(mutant)
        ask = engine.transfers._ask

        def ask_and_kill(request: object, ask: Callable[..., object] = ask) -> object:
            answer = ask(request)
            stage.server.kill()
            return answer

        engine.transfers._ask = ask_and_kill  # type: ignore[assignment, method-assign]
        with pytest.raises(outcome):
            engine.run(PROMPT)
        engine.close()
        stage.start_server()
        wait_for_memory(stage.url)


def test_a_promise_that_the_scheduler_cannot_keep_ends_all_ranks_alike(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rank 0 alone ended, the others would wait for what it has to tell them."""
    engine = start(Setup(num_ranks=2, shape=PoolShape(heads=1)))
    ended: list[int] = []
    for rank, worker in enumerate(engine.workers):

        def load(stream: object, rank: int = rank, do: Callable[[object], None] = worker.start_load_kv) -> None:
            try:
                do(stream)
            except KVFerryError:
                ended.append(rank)
                raise

        monkeypatch.setattr(worker, "start_load_kv", load)
    monkeypatch.setattr(engine.scheduler._side, "plan", mock.Mock(side_effect=RequestError("lease", "it is gone")))
    with pytest.raises(EngineDead, match="it is gone"):
        engine.run(PROMPT)
    assert sorted(ended) == [0, 1]


def test_an_engine_is_caught_that_does_not_load(warm: Warm) -> None:
    with pytest.raises(WrongKV):
        warm(trt_mutants.not_loading()).run(PROMPT)


def test_an_engine_is_caught_that_drops_a_promise_which_was_overtaken(warm: Warm) -> None:
    """While a request waits for its first step, another leaves the beginning of what is promised in the engine."""
    setup = Setup(v2=True, waits=3, shape=PoolShape(blocks=14, tokens=64))
    for mutant in (OURS, trt_mutants.dropping_overtaken_promises()):
        engine = warm(mutant, setup)
        before = engine.submit([*PROMPT[:100], 5])
        while before.state is State.WAITING:
            engine.step()
        request = engine.submit(PROMPT)
        engine.step()
        assert (request.asked_at, request.offered) == (0, 192)
        if mutant is OURS:
            engine.finish(request)
            assert (request.local, request.matched) == (64, 128)
        else:
            with pytest.raises(WrongKV):
                engine.finish(request)
        engine.close()


def test_metadata_is_not_taken_back(warm: Warm) -> None:
    setup = dataclasses.replace(KEEPS_NOTHING, repeats_hooks=True)
    with pytest.raises(EngineDead, match="lease"):
        warm(trt_mutants.repeating_plans(), setup).run(PROMPT)


def test_blocks_without_a_page_are_nobodys(warm: Warm) -> None:
    for holes in (1, 2, 3):
        (request,) = warm(trt_mutants.answering(lambda *of: (of[2], False)), dataclasses.replace(V2, holes=holes)).run(
            PROMPT
        )
        assert request.matched == 192
    setup = dataclasses.replace(V2, holes=1)
    with pytest.raises(RuleBroken, match="written to"):
        warm(trt_mutants.indexing_with_minus_one(13), setup).run(PROMPT)


def test_saves_that_nobody_began(warm: Warm) -> None:
    with pytest.raises(RuleBroken, match="request 999"):
        warm(trt_mutants.ending_unknown_saves()).run(PROMPT)


def test_metadata_has_to_be_sent(warm: Warm) -> None:
    with pytest.raises(EngineDead, match=r"pickle|local"):
        warm(trt_mutants.unpicklable()).run(PROMPT)


@pytest.mark.parametrize("method", ["bind_connector_meta", "start_load_kv", "get_finished"])
def test_what_a_worker_raises_between_forwards_ends_the_engine(warm: Warm, method: str) -> None:
    with pytest.raises(EngineDead, match="it broke"):
        warm(trt_mutants.raising(method)).run(PROMPT)


@pytest.mark.parametrize("method", ["wait_for_layer_load", "save_kv_layer", "wait_for_save"])
def test_what_a_worker_raises_in_a_forward_fails_the_requests(warm: Warm, method: str) -> None:
    engine = warm(trt_mutants.raising(method))
    assert [request.state for request in engine.run(PROMPT, PROMPT[:50])] == [State.FAILED] * 2
    assert not engine.dead


def test_loads_beside_the_steps_are_allowed_in_themselves(warm: Warm) -> None:
    engine = warm(trt_mutants.asynchronous(steps=2, heeds_ends=True))
    (request,) = engine.run(PROMPT)
    assert request.matched == 192
    assert request.loaded


@pytest.mark.parametrize(("silently", "heeds_ends"), [(True, True), (True, False), (False, False)])
def test_an_engine_is_caught_that_loads_after_a_cancel(warm: Warm, silently: bool, heeds_ends: bool) -> None:
    """One that heeds what it is told is caught, too, where it is told nothing: so ours has no such loads."""
    engine = warm(trt_mutants.asynchronous(steps=2, heeds_ends=heeds_ends))
    request = engine.submit(PROMPT)
    engine.step()
    assert request.state is State.LOADING
    engine.cancel(request, silently=silently)
    with pytest.raises(RuleBroken, match="were written to"):
        engine.finish(*[engine.submit([3] * 40) for _ in range(3)])
