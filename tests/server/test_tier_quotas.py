"""What a tenant may fill of the disk and of the bucket: it gives up its own, or is skipped, and that is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from doubles.memory_tier import MemoryTier
from kvferry.cache.tiers.format import HEADER_BYTES
from kvferry.errors import TierUnavailableError
from kvferry.server.tiers import bucket_quotas
from serving.tiers import CHUNK as ENGINE_CHUNK
from serving.tiers import MakeStage, load, settle, started, store
from tier_bench import CHUNK, SPACE, TierBench, name

Make = Callable[..., TierBench]
OBJECT = CHUNK + HEADER_BYTES


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes benches, and closes them."""
    made: list[TierBench] = []

    def make_one(**arguments: object) -> TierBench:
        made.append(TierBench(16, **arguments))  # type: ignore[arg-type]
        made[-1].settle()
        return made[-1]

    yield make_one
    for bench in made:
        bench.close()


def stored(bench: TierBench, *prompts: str) -> TierBench:
    for prompt in prompts:
        bench.store(prompt)
        bench.settle()
    return bench


def remote_of(bench: TierBench) -> MemoryTier:
    assert bench.remote is not None
    return bench.remote


def test_on_disk_a_tenant_at_its_quota_evicts_its_own(make: Make) -> None:
    disk = MemoryTier()
    bench = stored(make(disk=disk, quotas=({"t": 3 * CHUNK},)), "abc", "xy")
    assert set(disk.chunks) == {name("a"), name("x"), name("xy")}
    assert (bench.values()["disk_evicted"], bench.values()["disk_writes_over_quota"]) == (2, 0)
    stored(bench, "pqrs")
    assert set(disk.chunks) == {name("p"), name("pq"), name("pqr")}
    assert bench.values()["disk_writes_over_quota"] == bench.values()["disk_writes_skipped"] == 1
    assert not bench.index.dirty


def test_a_tenant_with_a_quota_of_nothing_has_no_disk(make: Make) -> None:
    disk = MemoryTier()
    bench = stored(make(disk=disk, quotas=({"*": 0, "u": 1 << 20},)), "abc")
    assert not disk.chunks
    assert bench.values()["disk_writes_over_quota"] == 3


def test_what_is_on_disk_beyond_a_quota_goes_at_the_next_start(make: Make) -> None:
    disk = MemoryTier()
    stored(make(disk=disk), "abc", "xyz")
    bench = make(disk=disk, quotas=({"*": 2 * CHUNK},))
    while bench.tiers.more:
        bench.tick()
    bench.settle()
    assert len(disk.chunks) == bench.values()["disk_chunks"] == 2


def test_in_the_bucket_a_tenant_at_its_quota_is_skipped(make: Make) -> None:
    remote = MemoryTier("remote")
    bench = stored(make(remote=remote, quotas=({}, {"t": 3 * OBJECT})), "ab")
    assert not remote.chunks  # it was not known yet what is there
    bench.tick(11)
    bench.settle()
    assert set(remote.chunks) == {name("a"), name("ab")}
    before = bench.values()["remote_writes_over_quota"]
    stored(bench, "abcde")
    assert set(remote.chunks) == {name("a"), name("ab"), name("abc")}
    assert bench.values()["remote_writes_over_quota"] - before == 2
    assert not bench.index.dirty


def test_what_others_have_written_counts_and_is_looked_at_again(make: Make) -> None:
    remote = MemoryTier("remote")
    stored(make(remote=remote), "pq")
    bench = make(remote=remote, quotas=({}, {"*": 4 * OBJECT}))
    assert bench.load("pqr") == 2  # a lookup is enough to have it looked at
    stored(bench, "a")
    del remote.chunks[name("p")], remote.chunks[name("pq")]
    stored(bench, "xyz")
    assert set(remote.chunks) == {name("a"), name("x")}
    bench.tick(bucket_quotas._AGAIN_S + 1)
    bench.settle()
    stored(bench, "xyzz")
    assert set(remote.chunks) == {name("a"), name("x"), name("xy"), name("xyz")}
    bench.tiers.clear(SPACE)
    bench.index.discard_space(SPACE)
    bench.settle()
    bench.tick()
    bench.settle()
    stored(bench, "jklm")
    assert len(remote.chunks) == 4


def test_a_write_that_fails_or_is_under_way_counts_as_what_it_is(make: Make) -> None:
    remote = MemoryTier("remote")
    bench = make(remote=remote, quotas=({}, {"*": 2 * OBJECT}))
    bench.load("a")
    remote.failures["write"] = TierUnavailableError("gone")
    stored(bench, "ab")
    remote.failures.clear()
    remote.stop("write")
    bench.store("xy")
    bench.store("z")
    remote.let_go()
    bench.settle()
    assert set(remote.chunks) == {name("x"), name("xy")}


def test_nothing_is_written_while_it_cannot_be_found_out_what_is_there(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    remote = MemoryTier("remote")
    remote.failures["measure"] = TierUnavailableError("status 403 Forbidden")
    bench = make(remote=remote, quotas=({}, {"*": 4 * OBJECT}))
    for _ in range(5):
        stored(bench, "ab")
        bench.tick(bucket_quotas._AFTER_FAILURE_S + 1)
        bench.settle()
    assert not remote.chunks
    assert bench.values()["remote_paused"] == 0
    assert [record.getMessage() for record in caplog.records].count(
        "what a tenant with a quota has in the bucket cannot be found out: status 403 Forbidden"
    ) == 1
    remote.failures.clear()
    for _ in range(2):
        bench.tick(bucket_quotas._AFTER_FAILURE_S + 1)
        bench.settle()
    assert len(remote.chunks) == 2  # what was left out is written, as memory still has it


def test_a_server_keeps_to_the_quotas_of_its_settings(make_stage: MakeStage, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    config = {"remote_url": f"file://{shared}", "disk_path": str(tmp_path / "disk"), "disk_bytes": 64 << 20}
    quotas = {"tenant_disk_quotas": {"*": 3 * ENGINE_CHUNK}, "tenant_remote_quotas": {"*": 5 * ENGINE_CHUNK}}
    engine = started(make_stage(**config, **quotas))
    assert load(engine, 1, 1, []) == 0
    settle(engine, "remote")
    held = store(engine, 1, 6)
    values = settle(engine, "remote")
    assert (values["disk_chunks"], values["disk_writes_over_quota"]) == (3, 3)
    assert (values["remote_chunks_written"], values["remote_writes_over_quota"]) == (4, 2)  # an object has a header
    assert len([path for path in shared.rglob("*") if path.is_file()]) == 4
    assert load(engine, 1, 6, held) == 6
