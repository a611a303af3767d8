"""`/metrics` and `/health`, as Prometheus and an orchestrator see them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.client import CacheClient
from kvferry.errors import ShareError
from kvferry.server import CacheServer, ServerConfig
from kvferry.server.watch import metrics as metrics_module
from kvferry.server.watch import snapshots as snapshots_module
from kvferry.server.watch.measures import MEASURES
from kvferry.server.watch.prometheus import metrics_of, samples_of
from kvferry.server.watch.snapshots import Question
from serving.process import eventually


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    config = ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=1 << 20, device="cpu", metrics=":0")
    with CacheServer(config) as made:
        yield made


def port_of(server: CacheServer) -> int:
    assert server.metrics_url is not None
    return int(server.metrics_url.rpartition(":")[2].partition("/")[0])


def get(server: CacheServer, path: str) -> tuple[int, str]:
    assert server.metrics_url is not None
    url = server.metrics_url.removesuffix("/metrics") + path
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(server: CacheServer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    code, text = get(server, "/metrics")
    assert code == 200
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_says_what_stats_say(server: CacheServer) -> None:
    with CacheClient(server.config.socket_path) as client:
        eventually(lambda: client.stats()["memory_bytes"] == 1 << 20)
        values, scraped = client.stats(), scrape(server)
    assert scraped["kvferry_sessions", ()] == values["sessions"] == 1
    assert scraped["kvferry_healthy", ()] == values["healthy"] == 1
    assert scraped["kvferry_tier_capacity_bytes", (("tier", "memory"),)] == 1 << 20
    for sample in samples_of(values):
        measure = MEASURES[sample.name]
        labels = ((measure.label, sample.label),) if measure.label else ()
        name = f"kvferry_{sample.name}" + ("" if measure.is_gauge else "_total")
        assert scraped[name, labels] == sample.value, name


def test_every_value_of_a_server_with_all_tiers_is_described(tmp_path: Path) -> None:
    config = ServerConfig(
        socket_path=str(tmp_path / "s"),
        memory_bytes=1 << 20,
        device="cpu",
        disk_path=str(tmp_path / "disk"),
        disk_bytes=1 << 20,
        remote_url=f"file://{tmp_path}/remote",
        verify_memory=True,
        metrics=":0",
    )
    with CacheServer(config) as server:
        samples = list(samples_of(server.snapshot().values))
        scraped = scrape(server)
    unknown = {sample.name for sample in samples} - set(MEASURES)
    assert not unknown, "describe these in kvferry/server/watch/measures.py"
    for tier in ("disk", "remote"):
        assert scraped["kvferry_tier_chunks_written_total", (("tier", tier),)] == 0


def test_the_process_and_the_version_are_there(server: CacheServer) -> None:
    scraped = scrape(server)
    assert scraped["process_resident_memory_bytes", ()] > 1 << 20
    assert any(name == "kvferry_build_info" for name, _ in scraped)


def test_families_have_their_labels() -> None:
    values = {"misses_evicted": 1, "misses_not_stored": 2, "disk_queue": 3, "remote_queue": 4, "misses": 3}
    found = {
        (sample.name, *sample.labels.items()): sample.value
        for metric in metrics_of({**values, "held_bytes_GPU-1": 5, "memory_used_bytes": 6, "disk_news": 7})
        for sample in metric.samples
    }
    assert found == {
        ("kvferry_misses_total", ("reason", "evicted")): 1,
        ("kvferry_misses_total", ("reason", "not_stored")): 2,
        ("kvferry_tier_queue", ("tier", "disk")): 3,
        ("kvferry_tier_queue", ("tier", "remote")): 4,
        ("kvferry_held_bytes", ("device", "GPU-1")): 5,
        ("kvferry_tier_used_bytes", ("tier", "memory")): 6,
        ("kvferry_disk_news",): 7,
    }


def test_health_is_told_and_other_paths_are_not_there(server: CacheServer) -> None:
    code, text = get(server, "/health?verbose")
    assert (code, json.loads(text)) == (200, {"healthy": True, "reasons": []})
    assert get(server, "/")[0] == 404


def test_a_failure_of_a_part_is_unhealthy(server: CacheServer) -> None:
    server._parts.health.fail("cpu: broken")
    eventually(lambda: get(server, "/health")[0] == 503)
    assert json.loads(get(server, "/health")[1])["reasons"] == ["cpu: broken"]
    assert scrape(server)["kvferry_healthy", ()] == 0


def test_a_loop_that_hangs_is_told_from_outside(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "_ANSWER_S", 0.2)
    there, go_on = threading.Event(), threading.Event()

    class Hang:
        pass

    def hang(_: Hang) -> None:
        there.set()
        go_on.wait(30)

    server._parts.handlers[Hang] = hang  # type: ignore[index]
    server._loop.post(Hang())
    assert there.wait(10)
    try:
        for _ in range(3):
            code, text = get(server, "/health")
            assert code == 503
            assert "the loop does not answer within 0.2 s: the loop has been in its loop" in text
        assert scrape(server)["kvferry_healthy", ()] == 0
        assert sum(isinstance(item, Question) for item in server._loop._inbox) == 1
    finally:
        go_on.set()
    eventually(lambda: get(server, "/health")[0] == 200)


def test_clients_that_say_nothing_hold_up_no_other(server: CacheServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(server))))
        started = time.monotonic()
        assert get(server, "/health")[0] == 200
        assert time.monotonic() - started < 4  # less than one of them is waited for


def test_where_there_are_too_many_connections_the_oldest_makes_room(server: CacheServer) -> None:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(("127.0.0.1", port_of(server)))) for _ in range(16)]
        for sock in socks:
            sock.sendall(b"G")
        assert get(server, "/health")[0] == 200
        socks[0].settimeout(10)
        assert socks[0].recv(1) == b""


def test_a_request_has_one_time_limit_however_often_a_byte_of_it_comes(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "_REQUEST_S", 0.5)
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", port_of(server))) as sock:
        sock.settimeout(0.05)
        while time.monotonic() - started < 20:
            with contextlib.suppress(TimeoutError):
                try:
                    sock.sendall(b"G")
                    if sock.recv(1) == b"":
                        break
                except ConnectionError:
                    break
        else:
            pytest.fail("the connection was not closed")


def test_a_head_without_an_end_is_not_read_on(server: CacheServer) -> None:
    with socket.create_connection(("127.0.0.1", port_of(server))) as sock:
        sock.settimeout(4)  # less than the time limit of a request
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"GET /health HTTP/1.0\r\n" + b"X-Y: " + b"z" * 20_000)
            assert sock.recv(1) == b""
    assert get(server, "/health")[0] == 200


def test_a_server_that_stops_waits_for_no_client(tmp_path: Path) -> None:
    config = ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=1 << 20, device="cpu", metrics=":0")
    with contextlib.ExitStack() as stack, CacheServer(config) as server:
        for _ in range(16):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(server))))
            sock.sendall(b"GET /metrics")
        assert get(server, "/health")[0] == 200
        metrics = server._parts.metrics
        assert metrics is not None
        started = time.monotonic()
        metrics.close()
        assert time.monotonic() - started < 4  # no request's time limit has passed by then
        names = {thread.name for thread in threading.enumerate()}
        assert not any(name.startswith("kvferry-metrics") for name in names)


def test_an_address_that_is_taken_is_told(server: CacheServer, tmp_path: Path) -> None:
    assert server.metrics_url is not None
    taken = server.metrics_url.removeprefix("http://").removesuffix("/metrics")
    config = ServerConfig(socket_path=str(tmp_path / "t"), memory_bytes=1 << 20, device="cpu", metrics=taken)
    with pytest.raises(ShareError, match=f"cannot be served at {taken}: .*choose another"):
        CacheServer(config).start()
    assert not (tmp_path / "t").exists()


def test_a_stopped_server_has_no_thread_and_no_port_left(tmp_path: Path) -> None:
    config = ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=1 << 20, device="cpu", metrics="127.0.0.1:0")
    with CacheServer(config) as server:
        assert get(server, "/health")[0] == 200
    assert not any(thread.name == "kvferry-metrics" for thread in threading.enumerate())
    with pytest.raises(OSError, match="refused"):
        get(server, "/health")
