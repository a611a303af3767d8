"""Engines in this process, and in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvferry.p2p import P2pConfig, P2pNcclEngine
from p2p.p2p_side import FORMAT, make_caches
from p2p.pairs import Pair
from p2p.sides import Sides
from serving.fixtures import zygote as zygote
from serving.process import Zygote

Make = Callable[..., P2pNcclEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes engines, in this process; with `caches=` they have KV caches."""
    with ExitStack() as ended:

        def made(caches: Any = None, **config: Any) -> P2pNcclEngine:
            engine = P2pNcclEngine(
                P2pConfig(**{"kv_buffer_size": 16 << 20, "heartbeat_s": 5.0, "connect_timeout_s": 20.0, **config})
            )
            ended.callback(engine.close)
            if caches is not None:
                engine.register_kv_caches(caches if caches is not True else make_caches(), format=FORMAT)
            return engine

        yield made


@pytest.fixture(params=["host", "ipc"])
def carrier(request: pytest.FixtureRequest) -> str:
    """The one that engines come to use by themselves; a module that is about one of them has its own."""
    name: str = request.param
    return name


@pytest.fixture
def pair(make: Make, carrier: str) -> Pair:
    """P and D with their caches, in memory that can be mapped where the carrier needs that."""
    caches = [make_caches(seed=seed, shared=carrier == "ipc") for seed in (1, 2)]
    return Pair(make(caches[0]), caches[0], make(caches[1]), caches[1])


@pytest.fixture
def sides(zygote: Zygote) -> Iterator[Sides]:
    """Starts engines in processes of their own."""
    made = Sides(zygote)
    yield made
    made.close()
