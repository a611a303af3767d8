"""Registrations: what is refused, and how; proofs that the server maps the memory; what is kept, and how long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.client import CacheClient
from kvferry.client.proofs import Nonces, Probes
from kvferry.client.storages import Storages
from kvferry.errors import LayoutError, ShareError
from kvferry.ipc import allocate_shared
from serving.engine_side import FORMAT, link_of
from serving.process import Stage, eventually
from serving.storages import storages_of

GOOD: dict[str, Any] = {"engine_id": "e", "model": "m", "format": FORMAT}


@pytest.fixture
def cache() -> torch.Tensor:
    made = allocate_shared((2, 8, 16, 2, 8), torch.float32)
    return made.copy_(torch.arange(made.numel(), dtype=torch.float32).view(made.shape))


@pytest.fixture
def client(stage: Stage) -> Iterator[CacheClient]:
    with CacheClient(stage.url) as made:
        yield made


BAD_CACHES: list[tuple[Any, dict[str, Any], str]] = [
    ([torch.zeros(2, 8, 16, 2, 8)], {}, "kv_caches is a list; give a mapping from layer names to tensors"),
    (torch.zeros(2, 8, 16, 2, 8), {}, "kv_caches is a Tensor"),
    (None, {}, "kv_caches is a NoneType"),
    (
        {"a": np.zeros((2, 8, 16, 2, 8))},
        {},
        r"kv_caches\['a'\] is a numpy.ndarray; names are strings, and values torch",
    ),
    ({"a": [torch.zeros(2)]}, {}, r"kv_caches\['a'\] is a builtins.list"),
    ({0: torch.zeros(2, 8, 16, 2, 8)}, {}, r"kv_caches\[0\] is a torch.Tensor; names are strings"),
    ({}, {}, "kv_caches is empty"),
    (
        {"pool": torch.zeros(8, 2, 2, 16 * 2 * 8)},
        {"format": "trtllm_pool"},
        "needs kv_layout, num_kv_heads, tokens_per_block and head_dim",
    ),
]


@pytest.mark.parametrize(("caches", "changes", "words"), BAD_CACHES)
def test_what_is_no_kv_cache(client: CacheClient, caches: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        client.register_kv_caches(caches, **{**GOOD, **changes})
    assert client.stats()["registrations"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine_id": ""}, "^engine_id is ''"),
        ({"engine_id": 7}, "^engine_id is 7"),
        ({"model": ""}, "^model is ''"),
        ({"model": "m" * 513}, "^model is 'mmm"),
        ({"rank": 2, "world_size": 2}, "^rank 2 of world size 2; ranks start at 0"),
        ({"rank": -1}, "^rank -1 of world size 1"),
    ],
)
@pytest.mark.parametrize("connected", [True, False])
def test_what_is_no_rank(
    stage: Stage, cache: torch.Tensor, changes: dict[str, Any], words: str, connected: bool
) -> None:
    """Said at once, also where there is no server to say it."""
    if not connected:
        stage.server.kill()
        eventually(lambda: not stage.server.alive)
    with CacheClient(stage.url, required=False) as client, pytest.raises(ValueError, match=words):
        client.register_kv_caches({"layer": cache}, **{**GOOD, **changes})


def test_the_same_cache_again_changes_nothing(client: CacheClient, cache: torch.Tensor) -> None:
    for _ in range(3):
        client.register_kv_caches({"layer": cache}, **GOOD)
    assert client.stats()["registrations"] == 1
    other = allocate_shared((2, 8, 16, 2, 8), torch.float32)
    for caches, changes in (({"layer": other}, {}), ({"other": cache}, {}), ({"layer": cache}, {"engine_id": "f"})):
        with pytest.raises(ValueError, match=r"other KV caches registered; unregister\(\) first"):
            client.register_kv_caches(caches, **{**GOOD, **changes})
    client.unregister()
    client.register_kv_caches({"layer": other}, **GOOD)
    assert client.stats()["registrations"] == 2


def test_memory_goes_with_its_last_use_not_with_the_next_garbage_collection(stage: Stage) -> None:
    gc.disable()
    try:
        for end in (CacheClient.close, CacheClient.unregister):
            client = CacheClient(stage.url)
            cache = allocate_shared((2, 8, 16, 2, 8), torch.float32)
            client.register_kv_caches({"layer": cache}, **GOOD)
            link_of(client)._hang_up("lost by the test")
            eventually(lambda client=client: client.connected)  # type: ignore[misc]
            registration = client._presence.registration
            assert registration is not None
            seen = weakref.ref(registration.storages.flats[0])
            del cache, registration
            end(client)
            assert seen() is None
            client.close()
    finally:
        gc.enable()


@pytest.fixture
def storages(cache: torch.Tensor) -> Iterator[Storages]:
    made = storages_of({"a": cache, "b": cache.clone()})
    yield made
    made.close()


def test_a_wrong_nonce_is_a_named_refusal(storages: Storages) -> None:
    before = [flat.clone() for flat in storages.flats]
    with Nonces(storages) as nonces:
        written = [flat[:64].numpy().tobytes() for flat in storages.flats]
        assert not torch.equal(storages.flats[0], before[0])
        nonces.check(written)
        with pytest.raises(ShareError, match=r"storage 1 .*has not mapped this memory"):
            nonces.check([written[0], bytes(64)])
        with pytest.raises(ShareError, match="0 storages of 2"):
            nonces.check([])
    assert all(torch.equal(a, b) for a, b in zip(storages.flats, before, strict=True))
    Nonces(storages)  # writes nothing yet
    assert all(torch.equal(a, b) for a, b in zip(storages.flats, before, strict=True))


def read_at(storages: Storages, offsets: Sequence[int]) -> list[bytes]:
    return [flat[start : start + 64].numpy().tobytes() for flat, start in zip(storages.flats, offsets, strict=True)]


def test_probes_write_nothing_and_see_what_is_there_now(storages: Storages) -> None:
    before = [flat.clone() for flat in storages.flats]
    seen: set[int] = set()
    for _ in range(200):
        probes = Probes(storages, at_start=False)
        assert all(offset % 64 == 0 for offset in probes.offsets)
        seen |= set(probes.offsets)
        read = read_at(storages, probes.offsets)
        assert [len(data) for data in read] == [64, 64]
        probes.check(read)
    assert len(seen) > 50
    assert all(torch.equal(a, b) for a, b in zip(storages.flats, before, strict=True))
    with pytest.raises(ShareError, match="storage 0"):
        probes.check([b"?" * 64, b"?" * 64])
    start = Probes(storages, at_start=True)
    assert start.offsets == ()
    start.check(read_at(storages, (0, 0)))


@pytest.mark.parametrize("num_wrong", [4, 5])
def test_memory_that_changes_in_that_moment_is_looked_at_again(
    stage: Stage,
    cache: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_wrong: int,
) -> None:
    """Five times; then the whole attempt has failed, and is repeated."""
    check, wrong = Probes.check, [b"?" * 64] * num_wrong

    def check_changed(self: Probes, read: Sequence[bytes]) -> None:
        check(self, [wrong.pop()] if wrong else read)

    monkeypatch.setattr(Probes, "check", check_changed)
    with CacheClient(stage.url) as client:
        client.register_kv_caches({"layer": cache}, **GOOD)
        before = cache.clone()
        link_of(client)._hang_up("lost by the test")
        eventually(lambda: client.connected)
        assert wrong == []
        assert torch.equal(cache, before)
        stats = client.stats()
        assert (stats["engines"], stats["registrations"]) == (1, 2)
    failed = [record for record in caplog.records if "has not mapped this memory" in record.getMessage()]
    assert len(failed) == num_wrong // 5
