"""How fast bytes move, by tier and direction, as Prometheus sees it."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvferry.client import CacheClient
from kvferry.ipc import allocate_shared
from kvferry.server import CacheServer, ServerConfig
from kvferry.server.watch.transfers import READ, WRITE, Moved, Transfers
from serving.engine_side import CHUNK_BLOCKS, CHUNK_TOKENS, prompt
from serving.process import eventually

PAGE = Path(__file__).parents[2] / "docs" / "cache-server.md"
CHUNK = 2 * 64 * 8 * 8 * 4  # K and V of 64 tokens
TOKENS = prompt(1, 4 * CHUNK_TOKENS)
BLOCKS = list(range(4 * CHUNK_BLOCKS))


def values_of(metrics: tuple[Metric, ...]) -> dict[tuple[str, ...], float]:
    """Samples by their names, tiers, directions, and bounds."""
    samples = [sample for metric in metrics for sample in metric.samples]
    names = ("tier", "direction", "le")
    return {(each.name, *(each.labels[name] for name in names if name in each.labels)): each.value for each in samples}


def scrape(server: CacheServer) -> dict[tuple[str, ...], float]:
    assert server.metrics_url is not None
    with urllib.request.urlopen(server.metrics_url, timeout=10) as reply:
        return values_of(tuple(text_string_to_metric_families(reply.read().decode())))


def test_calls_are_counted_by_how_long_they_took_beside_their_bytes() -> None:
    transfers = Transfers()
    assert values_of(transfers.metrics()) == {}
    for moved in (Moved(WRITE, 100, 0.0002), Moved(WRITE, 50, 2.0), None, Moved(READ, 7, 99.0)):
        transfers.add("disk", moved)
    values = values_of(transfers.metrics())
    assert values["kvferry_transfer_bytes_total", "disk", WRITE] == 150
    assert values["kvferry_transfer_seconds_count", "disk", WRITE] == 2
    assert values["kvferry_transfer_seconds_sum", "disk", WRITE] == pytest.approx(2.0002)
    assert [values["kvferry_transfer_seconds_bucket", "disk", WRITE, le] for le in ("0.0001", "0.0003", "3.0")] == [
        0,
        1,
        2,
    ]
    assert [values["kvferry_transfer_seconds_bucket", "disk", READ, le] for le in ("30.0", "+Inf")] == [0, 1]
    assert not any(name[0].endswith("_created") for name in values)


def test_a_scrape_has_the_rates_of_all_tiers_in_both_directions(tmp_path: Path) -> None:
    config = ServerConfig(
        socket_path=str(tmp_path / "s"),
        memory_bytes=1 << 20,
        device="cpu",
        disk_path=str(tmp_path / "disk"),
        disk_bytes=1 << 30,
        remote_url=f"file://{tmp_path}/remote",
        metrics=":0",
    )
    cache = allocate_shared((2, 64, 16, 8, 8))
    with CacheServer(config) as server, CacheClient(config.socket_path) as client:
        client.register_kv_caches({"layer": cache}, engine_id="e", model="m", format="vllm_flash_attention")
        eventually(lambda: client.stats()["memory_bytes"] == 1 << 20 and not client.stats()["disk_scanning"])
        client.store(TOKENS, BLOCKS).wait(10)
        client.retrieve(client.lookup("r", TOKENS).lease_id, BLOCKS, CHUNK_TOKENS).wait(10)
        eventually(lambda: client.stats()["disk_chunks_written"] == client.stats()["remote_chunks_written"] == 4)
        values = scrape(server)
        stats = client.stats()
    for tier in ("memory", "disk", "remote"):
        assert values["kvferry_transfer_bytes_total", tier, WRITE] == 4 * CHUNK
        assert 0 < values["kvferry_transfer_seconds_sum", tier, WRITE] < 60
        assert values["kvferry_transfer_seconds_count", tier, WRITE] == (1 if tier == "memory" else 4)
    assert values["kvferry_transfer_bytes_total", "memory", READ] == stats["bytes_retrieved"] == 4 * CHUNK
    assert ("kvferry_transfer_bytes_total", "disk", READ) not in values

    with CacheServer(config) as server, CacheClient(config.socket_path) as client:
        client.register_kv_caches({"layer": cache}, engine_id="e", model="m", format="vllm_flash_attention")
        eventually(lambda: client.stats()["memory_bytes"] == 1 << 20 and not client.stats()["disk_scanning"])
        assert client.lookup("r", TOKENS, wait_s=10).tokens == len(TOKENS)
        values = scrape(server)
    assert values["kvferry_transfer_bytes_total", "disk", READ] == 4 * CHUNK
    assert values["kvferry_transfer_seconds_bucket", "disk", READ, "+Inf"] == 4


def test_the_operators_page_tells_of_them() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert "`kvferry_transfer_seconds`" in page
    assert "`kvferry_transfer_bytes_total`" in page
