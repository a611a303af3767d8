"""An engine's own keys: page by page, from any page on, between real clients and a real server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry import CacheClient
from kvferry.config import ServerConfig
from kvferry.errors import KVFerryError, RequestError
from kvferry.ipc import allocate_shared
from kvferry.layout import ChunkKeys
from kvferry.server.server import CacheServer
from serving.process import eventually

PAGE = 16
NUM_PAGES = 12


def hexes(text: str, count: int) -> list[str]:
    """The page hashes of a prompt of that name: a chain."""
    made = [hashlib.sha256(text.encode()).hexdigest()]
    while len(made) < count:
        made.append(hashlib.sha256(bytes.fromhex(made[-1])).hexdigest())
    return made


def keys(text: str, start: int = 0, stop: int = 8) -> ChunkKeys:
    return ChunkKeys.from_hex(hexes(text, stop)[start:])


class Engine:
    """A client with a pool of pages, each full of one number."""

    def __init__(self, url: str, name: str, model: str = "m") -> None:
        self.client = CacheClient(url)
        self.pages = allocate_shared((NUM_PAGES, 2, PAGE, 2, 1, 8), torch.float32)
        self.client.register_kv_caches(
            {"pages": self.pages},
            engine_id=name,
            model=model,
            format="sglang_page_first",
            chunk_tokens=PAGE,
        )

    def store(self, some: ChunkKeys, pages: list[int], start_page: int = 0) -> tuple[int, int, int]:
        done = self.client.store(some, pages, start_page * PAGE).wait(10)
        return done.num_stored, done.num_present, done.num_skipped

    def fetch(self, some: ChunkKeys, pages: list[int], skip_pages: int = 0) -> int:
        """How many pages a lookup has found, and a retrieve filled."""
        found = self.client.lookup("r", some)
        if found.tokens:
            self.client.retrieve(found.lease_id, pages, skip_pages * PAGE).wait(10)
        return found.tokens // PAGE

    def values(self, *pages: int) -> list[float]:
        assert all(bool((self.pages[page] == self.pages[page].flatten()[0]).all()) for page in pages)
        return [float(self.pages[page].flatten()[0]) for page in pages]

    def number(self, first: int = 100) -> None:
        for page in range(NUM_PAGES):
            self.pages[page] = first + page


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "kv.sock")
    with CacheServer(ServerConfig(socket_path=path, memory_bytes=8 << 20, device="cpu")):
        yield f"unix://{path}"


@pytest.fixture
def engines(url: str) -> Iterator[tuple[Engine, Engine]]:
    made = Engine(url, "a"), Engine(url, "b")
    made[0].number()
    eventually(lambda: made[0].client.stats()["memory_bytes"] >= 8 << 20)
    yield made
    for engine in made:
        engine.client.close()


def test_pages_go_round_by_their_own_keys(engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    assert first.store(keys("x", stop=5), [4, 3, 7, 8, 9]) == (5, 0, 0)
    assert second.fetch(keys("x"), [0, 1, 2, 3, 4]) == 5
    assert second.values(0, 1, 2, 3, 4, 5) == [104, 103, 107, 108, 109, 0]
    assert second.fetch(keys("y"), []) == 0


def test_keys_that_begin_within_a_chain_are_found_there(engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    first.store(keys("x"), list(range(8)))
    assert second.fetch(keys("x", 5), [0, 1, 2]) == 3
    assert second.values(0, 1, 2, 3) == [105, 106, 107, 0]
    assert second.fetch(keys("x", 2), [4, 5, 6, 7, 8, 9], skip_pages=2) == 6
    assert second.values(4, 5, 6, 7, 8, 9) == [0, 0, 104, 105, 106, 107]


def test_what_is_stored_from_a_page_on_is_one_chain_with_what_was_there(engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    first.store(keys("x", stop=3), [0, 1, 2])
    assert first.store(keys("x", 2), [2, 3, 4, 5, 6, 7], start_page=1) == (5, 0, 0)
    assert second.fetch(keys("x"), list(range(8))) == 8
    assert second.values(*range(8)) == [100, 101, 102, 103, 104, 105, 106, 107]
    assert first.store(keys("x"), list(range(8))) == (0, 8, 0)
    assert first.store(keys("x", 3), [3, 4, 5, 6, 7]) == (0, 5, 0)


def test_a_chain_whose_beginning_is_unknown_stands_for_itself(engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    assert first.store(keys("x", 3), [3, 4, 5, 6, 7]) == (5, 0, 0)
    assert second.fetch(keys("x"), []) == 0
    assert second.fetch(keys("x", 3), [0, 1, 2, 3, 4]) == 5
    assert second.values(0, 4) == [103, 107]
    first.store(keys("x", stop=3), [0, 1, 2])
    assert second.fetch(keys("x"), [0, 1, 2]) == 3  # one chain ends; the next is asked for by its own first key
    assert second.fetch(keys("x", 3), [3, 4, 5, 6, 7]) == 5


def test_a_page_in_the_middle_is_kept_while_it_is_promised(engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    first.store(keys("x"), list(range(8)))
    found = second.client.lookup("r", keys("x", 6))
    assert first.client.clear(keys("x")) == 8
    assert first.client.lookup("s", keys("x", 6)).tokens == 0
    second.client.retrieve(found.lease_id, [0, 1]).wait(10)
    assert second.values(0, 1) == [106, 107]


def test_a_promise_taken_twice_or_with_too_few_blocks_fails_by_name(engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    first.store(keys("x"), list(range(8)))
    found = second.client.lookup("r", keys("x", 6))
    job = second.client.retrieve(found.lease_id, [0])
    with pytest.raises(KVFerryError, match="1 block ids for 2 chunks"):
        job.wait(10)
    second.client.retrieve(found.lease_id, [0, 1]).wait(10)
    with pytest.raises(RequestError, match="taken, released or overdue"):
        second.client.retrieve(found.lease_id, [0, 1]).wait(10)


def test_other_models_find_nothing(engines: tuple[Engine, Engine], url: str) -> None:
    engines[0].store(keys("x"), list(range(8)))
    other = Engine(url, "c", model="other")
    assert other.fetch(keys("x"), []) == 0
    other.client.close()


@pytest.mark.parametrize("bad", [["00"], ["zz" * 32], ["0" * 64, "1" * 66]])
def test_what_are_no_hashes_is_refused(bad: list[str]) -> None:
    with pytest.raises(ValueError, match=r"keys of other|non-hexadecimal"):
        ChunkKeys.from_hex(bad)


def test_half_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes of keys"):
        ChunkKeys(b"0" * 33)


def test_parts_that_stand_for_themselves_come_back_from_disk(tmp_path: Path) -> None:
    """The end of a prompt came before its beginning, on disk, too; and what goes on from the middle joins the chain."""
    path, disk = str(tmp_path / "kv.sock"), str(tmp_path / "disk")
    config = ServerConfig(socket_path=path, memory_bytes=8 << 20, device="cpu", disk_path=disk, disk_bytes=64 << 20)
    with CacheServer(config):
        first = Engine(f"unix://{path}", "a")
        eventually(lambda: first.client.stats()["memory_bytes"] >= 8 << 20)
        first.number()
        first.store(keys("x", 3, 6), [3, 4, 5])
        first.store(keys("x", stop=3), [0, 1, 2])
        first.store(keys("x", 5), [5, 6, 7], start_page=1)
        assert first.store(keys("x"), list(range(8))) == (0, 3, 5)  # two chains: the first ends
        eventually(lambda: first.client.stats()["disk_chunks"] >= 8, 20)
        first.client.close()
    with CacheServer(config):
        second = Engine(f"unix://{path}", "b")
        eventually(lambda: second.client.lookup("r", keys("x"), wait_s=5).tokens == 3 * PAGE, 20)
        eventually(lambda: second.client.lookup("s", keys("x", 3), wait_s=5).tokens == 5 * PAGE, 20)
        assert second.fetch(keys("x"), [0, 1, 2]) == 3
        assert second.fetch(keys("x", 3), [3, 4, 5, 6, 7]) == 5
        assert second.values(*range(8)) == [100, 101, 102, 103, 104, 105, 106, 107]
        assert second.fetch(keys("x", 6), [10, 11]) == 2
        second.client.close()
