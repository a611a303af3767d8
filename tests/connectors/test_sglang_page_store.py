"""Pages of a host pool by way of a real server: whole or left alone, in bounded time, whatever the server does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from connectors.sglang_doubles import LAYOUTS, PAGE, data, hashes, host_pool
from kvferry.client import CacheClient
from kvferry.connectors.sglang.host_pool import HostPages, host_pages
from kvferry.connectors.sglang.page_store import PageStore
from kvferry.connectors.sglang.questions import Questions
from kvferry.connectors.sglang.staging import Staging
from kvferry.errors import LayoutError
from serving.process import Stage, eventually, freeze

TIMEOUT_S = 2.0


class Rank:
    """A pool and what keeps it. `slots` pages of staging memory, half for each direction."""

    def __init__(self, url: str, name: str, layout: str = "page_first", *, slots: int = 8, value: float = 0.0) -> None:
        self.pool: SimpleNamespace = host_pool(layout)
        if value:
            self.pool.kv_buffer.fill_(value)
        self.pages: HostPages = host_pages(self.pool, shared=False)
        self.client = CacheClient(url, timeout_s=TIMEOUT_S, required=False)
        self.staging = Staging(self.pages, slots * self.pages.page_bytes)
        self.client.register_kv_caches(
            {"pages": self.staging.pages},
            engine_id=name,
            model="m",
            format=self.pages.format,
            hints=self.pages.hints(),
            chunk_tokens=PAGE,
        )
        self.questions = Questions(self.client, page_tokens=PAGE, pause_s=0.3, answer_timeout_s=TIMEOUT_S)
        self.store = PageStore(
            self.client, self.pages, staging=self.staging, questions=self.questions, timeout_s=TIMEOUT_S
        )

    def keep(self, keys: list[str], pages: list[int], before: list[str] | None = None) -> int:
        return self.store.keep(data(keys), pages, before=data(before or []))

    def fetch(self, keys: list[str], pages: list[int]) -> int:
        return self.store.fetch(data(keys), pages)

    def page(self, number: int) -> torch.Tensor:
        return self.pages.view[number].clone()


@pytest.fixture
def rank(stage: Stage) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(name: str, *args: str, **options: float) -> Rank:
        made.append(Rank(stage.url, name, *args, **options))  # type: ignore[arg-type]
        eventually(lambda: made[-1].client.stats()["memory_bytes"] >= 16 << 20)
        return made[-1]

    yield make
    for one in made:
        one.client.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_bit_for_bit_in_another_engine(rank: Callable[..., Rank], layout: str) -> None:
    first, second = rank("a", layout), rank("b", layout, value=-1.0)
    keys = hashes("x", 6)
    assert first.keep(keys, [3, 1, 0, 11, 5, 6]) == 6
    assert second.questions.count(data(keys)) == 6
    assert second.fetch(keys, [0, 2, 4, 6, 8, 10]) == 6
    for source, target in zip([3, 1, 0, 11, 5, 6], [0, 2, 4, 6, 8, 10], strict=True):
        assert second.page(target).equal(first.page(source))
    assert bool((second.pages.view[1::2] == -1).all())


def test_another_layout_or_another_prompt_is_a_miss(rank: Callable[..., Rank]) -> None:
    first, second = rank("a"), rank("b", "layer_first")
    first.keep(hashes("x", 3), [0, 1, 2])
    assert second.questions.count(data(hashes("x", 3))) == 0
    assert second.fetch(hashes("x", 3), [0, 1, 2]) == 0
    assert first.fetch(hashes("y", 3), [0, 1, 2]) == 0


def test_only_the_leading_pages_that_are_there_are_filled(rank: Callable[..., Rank]) -> None:
    first, second = rank("a"), rank("b", value=-1.0)
    keys = hashes("x", 5)
    first.keep(keys[:3], [0, 1, 2])
    assert second.fetch(keys, [4, 5, 6, 7, 8]) == 3
    assert bool((second.pages.view[7:9] == -1).all())


def test_what_is_known_is_not_copied_again(rank: Callable[..., Rank]) -> None:
    first = rank("a")
    keys = hashes("x", 6)
    assert first.keep(keys[:4], [0, 1, 2, 3]) == 4
    assert first.keep(keys, [0, 1, 2, 3, 4, 5]) == 6
    assert (first.store.counters["pages_kept"], first.store.counters["pages_present"]) == (6, 4)
    assert first.questions.runs(data(keys))[0].num_pages == 6  # one chain, though it came in two parts


def test_pages_after_known_ones_join_their_chain(rank: Callable[..., Rank]) -> None:
    first, second = rank("a"), rank("b")
    keys = hashes("x", 6)
    first.keep(keys[:2], [0, 1])
    first.keep(keys[2:4], [2, 3], before=keys[1:2])
    assert [run.num_pages for run in second.questions.runs(data(keys))] == [4]


def test_pages_after_unknown_ones_are_a_chain_of_their_own(rank: Callable[..., Rank]) -> None:
    first, second = rank("a"), rank("b")
    keys = hashes("x", 6)
    assert first.keep(keys[2:], [2, 3, 4, 5], before=keys[1:2]) == 4
    assert second.questions.count(data(keys)) == 0
    assert second.questions.count(data(keys[2:]), prefix=data(keys[:2])) == 4
    assert first.keep(keys[:2], [0, 1]) == 2
    runs = second.questions.runs(data(keys))
    assert [(run.start, run.num_pages) for run in runs] == [(0, 2), (2, 4)]
    second.questions.give_back(runs)
    assert second.client.stats()["leases"] == 0
    assert second.fetch(keys, list(range(6))) == 6
    assert second.page(5).equal(first.page(5))


def test_the_pages_before_count_for_what_follows_them(rank: Callable[..., Rank]) -> None:
    first = rank("a")
    keys = hashes("x", 6)
    first.keep(keys, list(range(6)))
    runs = first.questions.runs(data(keys[2:]), prefix=data(keys[:2]))
    assert [(run.start, run.num_pages, run.skip) for run in runs] == [(0, 4, 2)]
    assert first.questions.count(data(keys[4:])) == 2


def test_staging_too_small_for_a_page_is_refused(rank: Callable[..., Rank]) -> None:
    pages = rank("a").pages
    with pytest.raises(LayoutError, match="set at least"):
        Staging(pages, pages.page_bytes)


def test_a_dead_server_costs_nothing_but_misses(stage: Stage, rank: Callable[..., Rank]) -> None:
    first = rank("a")
    keys = hashes("x", 4)
    first.keep(keys, [0, 1, 2, 3])
    os.kill(stage.server.pid, signal.SIGKILL)
    eventually(lambda: not first.client.connected, 30)
    before = first.pages.view.clone()
    assert first.questions.count(data(keys)) == 0
    assert first.fetch(keys, [4, 5, 6, 7]) == 0
    assert first.keep(keys, [0, 1, 2, 3]) == 0
    assert first.pages.view.equal(before)


def test_a_stopped_server_is_waited_for_once_and_touches_no_page_later(stage: Stage, rank: Callable[..., Rank]) -> None:
    """It goes on when the pages have long become another prompt's."""
    first = rank("a")
    keys = hashes("x", 4)
    first.keep(keys, [0, 1, 2, 3])
    retrieve = first.client.retrieve

    def stop_first(*args: object, **options: object) -> object:
        freeze(stage.server.pid)
        return retrieve(*args, **options)  # type: ignore[arg-type]

    first.client.retrieve = stop_first  # type: ignore[method-assign, assignment]
    started = time.monotonic()
    try:
        assert first.fetch(keys, [4, 5, 6, 7]) == 0
        assert time.monotonic() - started < 10
        assert first.staging.for_reads.num_free == 0
        first.pages.view[4:8] = 5.0
        asked = time.monotonic()
        assert first.questions.count(data(keys)) == 0  # it is left alone
        assert first.keep(hashes("y", 2), [8, 9]) == 0
        assert time.monotonic() - asked < 5
    finally:
        os.kill(stage.server.pid, signal.SIGCONT)
    eventually(lambda: first.staging.for_reads.num_free == 4)
    assert bool((first.pages.view[4:8] == 5.0).all())
    first.client.retrieve = retrieve  # type: ignore[method-assign]
    eventually(lambda: first.fetch(keys, [4, 5, 6, 7]) == 4)
    assert first.page(4).equal(first.page(0))


def test_a_store_that_is_late_never_keeps_other_bytes(stage: Stage, rank: Callable[..., Rank]) -> None:
    first = rank("a")
    keys = hashes("x", 3)
    store = first.client.store

    def stop_first(*args: object, **options: object) -> object:
        freeze(stage.server.pid)
        return store(*args, **options)  # type: ignore[arg-type]

    first.client.store = stop_first  # type: ignore[method-assign, assignment]
    wanted = [first.page(page) for page in range(3)]
    try:
        assert first.keep(keys, [0, 1, 2]) == 0
        first.pages.view[:3] = 7.0
    finally:
        os.kill(stage.server.pid, signal.SIGCONT)
    eventually(lambda: first.staging.for_writes.num_free == 4)
    first.client.store = store  # type: ignore[method-assign]
    eventually(lambda: first.questions.is_patient, 30)
    count = first.fetch(keys, [4, 5, 6])  # it may have been kept, or not
    for place in range(count):
        assert first.page(4 + place).equal(wanted[place])
