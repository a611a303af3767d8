"""`kvferry bench server`: lookups by many clients at once, and whether the server's memory stays flat under load."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from kvferry.cli.bench_clients import BLOCK_SIZE, NUM_TOKENS, Churn, Lookups, Pings, lookup_prompt
from kvferry.cli.bench_lookup import bench_lookup
from kvferry.cli.bench_report import Result
from kvferry.cli.children import ServerProcess
from kvferry.client import CacheClient
from kvferry.reference.process import LineProcess

__all__ = ["ServerBenchConfig", "run_bench_server"]

POOL_BYTES = 64 << 20
CHURN_CLIENTS = 8
SAMPLES = 400
SETTLING_PART = 0.25  # of the load's time: what grows only once, such as the index of a pool that fills, grows there
FLAT_BYTES_PER_S = (16 << 20) / 3600
FLAT_BYTES = 1 << 20  # what a short run may grow by: allocators round


@dataclasses.dataclass(frozen=True)
class ServerBenchConfig:
    """`seconds` of load for the memory, `lookup_seconds` for each number of `clients`, `lookups` by one alone."""

    seconds: float = 60.0
    lookup_seconds: float = 4.0
    clients: tuple[int, ...] = (1, 8, 64)
    lookups: int = 300

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.lookup_seconds <= 0 or self.lookups < 2:
            raise ValueError(f"{self}: times must be above 0, lookups at least 2")
        if not self.clients or min(self.clients) < 1:
            raise ValueError(f"clients are {self.clients}; give at least one number above 0")


def run_bench_server(config: ServerBenchConfig) -> list[Result]:
    """All figures. Server and clients have ended when this returns or raises."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-"))
        server = stack.enter_context(ServerProcess(pathlib.Path(folder) / "server.sock", POOL_BYTES, "cpu"))
        results = [r for r in bench_lookup(server.url, "cpu", config.lookups) if r.name == "lookup_16384"]
        clients = stack.enter_context(LineProcess("clients", "kvferry.cli.bench_clients"))
        engine = stack.enter_context(CacheClient(server.url))
        _store_prompt(engine)
        for count in config.clients:
            results += _bench_clients(clients, server.url, count, config.lookup_seconds)
        return [*results, _bench_memory(clients, server, config.seconds)]


def _store_prompt(engine: CacheClient) -> None:
    """What the clients look up: KV so small that its size plays no part."""
    shape = (2, NUM_TOKENS // BLOCK_SIZE, BLOCK_SIZE, 1, 8)
    engine.register_kv_caches(
        {"layers.0": torch.zeros(shape, dtype=torch.bfloat16)},
        engine_id="bench-server",
        model="bench-server",
        format="vllm_flash_attention",
    )
    engine.store(lookup_prompt(), list(range(NUM_TOKENS // BLOCK_SIZE))).wait(60)


def _bench_clients(clients: LineProcess, url: str, count: int, seconds: float) -> list[Result]:
    """Rate and times of `count` clients, each of which asks again as soon as it has its answer."""
    asked = clients.call(Lookups(url=url, clients=count, seconds=seconds, engine_id="bench-server"), seconds + 150)
    pinged = clients.call(Pings(url=url, clients=count, seconds=seconds / 2), seconds + 150)
    rate, limit = (reply["count"] / reply["wall_s"] for reply in (asked, pinged))
    about = f"{NUM_TOKENS} tokens, cold, all found; processes: {count}; limit: their empty round trips"
    results = [Result(f"lookups_per_s_{count}", rate, "1/s", limit, rate / limit, about)]
    for name in ("p50", "p99"):
        value, limit = (reply[f"{name}_s"] * 1e3 for reply in (asked, pinged))
        results.append(Result(f"lookup_{name}_{count}", value, "ms", limit, value / limit, about))
    return results


def _bench_memory(clients: LineProcess, server: ServerProcess, seconds: float) -> Result:
    """The slope of a line through the server's private memory, while engines come, store, retrieve, and go."""
    clients.begin(Churn(url=server.url, clients=CHURN_CLIENTS, seconds=seconds))
    samples = _sample(lambda: _private_bytes(server.pid), seconds)
    done = clients.finish(120)
    slope = statistics.linear_regression(*zip(*samples, strict=True)).slope
    limit = max(FLAT_BYTES_PER_S, FLAT_BYTES / (samples[-1][0] - samples[0][0]))
    about = f"private memory of the server, {samples[0][1] >> 10} to {samples[-1][1] >> 10} KiB, over the last "
    about += (
        f"{samples[-1][0] - samples[0][0]:.0f} s of {done['count']} turns of {CHURN_CLIENTS} engines that look up, "
    )
    about += "retrieve, store, and come anew; limit: 16 MiB an hour, or 1 MiB in all"
    return Result("server_rss_slope", slope, "bytes/s", limit, slope / limit, about)


def _sample(read: Callable[[], int], seconds: float) -> list[tuple[float, int]]:
    """Seconds since the start, and what was read, at even distances after the time to settle."""
    started = time.monotonic()
    samples = []
    for number in range(SAMPLES):
        at = seconds * (SETTLING_PART + (1 - SETTLING_PART) * number / (SAMPLES - 1))
        time.sleep(max(0.0, started + at - time.monotonic()))
        samples.append((time.monotonic() - started, read()))
    return samples


def _private_bytes(pid: int) -> int:
    """Resident memory that is not shared: neither the pool nor what engines have shared."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
