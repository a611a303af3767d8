"""Prompts that share beginnings, through two engines one after the other, in each mode: here and on a GPU the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from doubles.trt_blocks import PoolShape
from doubles.trt_executor import FakeTrtExecutor, MakePool
from doubles.trt_fixtures import Start
from doubles.trt_memory import new_pool
from doubles.trt_requests import Request, Setup, State
from kvferry.client import CacheClient

CHUNK = 64
_PROMPT = list(range(1000, 1200))
PROMPTS = [_PROMPT[:cut] + [seed] * 20 for seed, cut in enumerate((0, 40, 64, 100, 128, 150, 192, 200))]
_PLAIN = Setup(keeps=False)
_V2 = Setup(v2=True, keeps=False, shape=PoolShape(blocks=14, tokens=64))
# V2 without room for more than a chunk's pages uses of a promise what whole pages the step has tokens left for: with 64
# tokens a step, one of which some other request takes, that is never any.
MODES: Mapping[str, Setup] = MappingProxyType(
    {
        "plain": _PLAIN,
        "overlap, chunked, two ranks": Setup(overlap=True, max_tokens=64, num_ranks=2, shape=PoolShape(heads=1)),
        "partial reuse": dataclasses.replace(_PLAIN, partial=True),
        "V2": _V2,
        "V2, chunked": dataclasses.replace(_V2, max_tokens=100),
        "V2, chunked, makes room": dataclasses.replace(_V2, max_tokens=64, grows=True),
        "V2, waits after the query": dataclasses.replace(_V2, keeps=True, waits=2),
    }
)


def check_mode(start: Start, setup: Setup, url: str, *, make_pool: MakePool = new_pool) -> None:
    """The second engine loads every whole chunk of the first; the double compares every byte that a forward reads."""
    outcomes: list[list[Request]] = []
    for _ in range(2):
        engine = start(setup, make_pool=make_pool)
        requests = engine.run(*PROMPTS)
        outcomes.append(requests)
        told = told_of(outcomes, engine, url)
        assert all(request.state is State.ENDED for request in requests), told
        engine.close()
        _check_stored(setup, url, told)
    first, second = outcomes
    assert [request.tokens for request in first] == [request.tokens for request in second], told
    wanted = [max(0, (request.prompt_len - 1) // CHUNK * CHUNK - request.asked_at) for request in second]
    assert [request.offered for request in second] == wanted, told
    assert any(request.matched for request in second), told


def _check_stored(setup: Setup, url: str, told: str) -> None:
    """Once for every rank, each chunk that any prompt has."""
    chunks = {tuple(prompt[:end]) for prompt in PROMPTS for end in range(CHUNK, len(prompt) + 1, CHUNK)}
    with CacheClient(url) as client:
        assert client.stats()["chunks"] == len(chunks) * setup.num_ranks, told


def told_of(outcomes: Sequence[Sequence[Request]], engine: FakeTrtExecutor, url: str) -> str:
    """All that helps to see from afar what went wrong."""
    names = ("request_id", "prompt_len", "state", "asked_at", "offered", "local", "promised", "matched")
    lines = [
        f"engine {number}: {', '.join(f'{name} {getattr(request, name)}' for name in names)}"
        for number, requests in enumerate(outcomes)
        for request in requests
    ]
    side = engine.scheduler._side
    lines.append(
        f"scheduler: {len(side)} requests left, trouble {side._promises._trouble!r}, {side._promises._client!r}"
    )
    for rank, worker in enumerate(engine.workers):
        lines.append(
            f"rank {rank}: told {sorted(worker._side._told)}, stores {worker._side._stores}, {worker._client!r}"
        )
    with CacheClient(url) as client:
        stats = {name: value for name, value in sorted(client.stats().items()) if value}
    return "\n".join([*lines, f"server: {stats}"])
