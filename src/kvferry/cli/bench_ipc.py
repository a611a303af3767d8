"""`kvferry bench ipc`: sharing a KV cache with another process, and getting its memory back after a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence

import torch

from kvferry import ipc
from kvferry.cli.bench_peer import Connect, Drop, Map, Read
from kvferry.cli.bench_report import Result, rate_result
from kvferry.cli.children import ServerProcess
from kvferry.cli.memory_back import find_held, measure_memory_back
from kvferry.cli.sizes import format_bytes
from kvferry.errors import DeadlineError
from kvferry.reference import EngineConfig, EngineProcess, ModelConfig, PagedConfig
from kvferry.reference.process import LineProcess
from kvferry.reference.worker import Init

__all__ = ["IpcBenchConfig", "run_bench_ipc"]

NUM_LAYERS = 80
# Nearly no weights, so that what a kill gives back is KV.
HOLDER_MODEL = ModelConfig(num_layers=2, hidden_size=256, num_heads=2, num_kv_heads=2, ffn_size=64, vocab_size=64)


@dataclasses.dataclass(frozen=True)
class IpcBenchConfig:
    """`size_bytes` is the allocation that is shared and mapped; `held_bytes` what each killed engine holds."""

    device: str
    size_bytes: int
    held_bytes: int
    repeats: int = 9
    kills: int = 5

    @classmethod
    def for_device(cls, device: str) -> IpcBenchConfig:
        if device == "cuda":
            return cls(device, size_bytes=4 << 30, held_bytes=4 << 30)
        return cls(device, size_bytes=256 << 20, held_bytes=128 << 20)


def run_bench_ipc(config: IpcBenchConfig) -> list[Result]:
    """All figures. Children have ended when this returns or raises."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        results = _bench_mapping(config, pathlib.Path(folder))
        return [*results, *_bench_memory_back(config, pathlib.Path(folder))]


def _bench_mapping(config: IpcBenchConfig, folder: pathlib.Path) -> list[Result]:
    layer_bytes = config.size_bytes // NUM_LAYERS // 512 * 512
    shape = (NUM_LAYERS, layer_bytes // 2)
    if config.device == "cuda":
        storage = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    else:
        storage = ipc.allocate_shared(shape, torch.bfloat16).fill_(0)
    with _peer(config, folder) as (child, sock):
        _time_mapping(child, sock, [storage.new_zeros(1) if storage.is_cuda else storage[:1]])
        timed = [_time_mapping(child, sock, list(storage.unbind(0))) for _ in range(config.repeats)]
        whole = [_time_mapping(child, sock, [storage]) for _ in range(config.repeats)]
        read = _read_mapped(child, sock, storage, config.repeats)
    times, opens = zip(*timed, strict=True)
    value, limit = statistics.median(times), statistics.median(time_s for time_s, _ in whole)
    about = f"{NUM_LAYERS} layers in one allocation of {format_bytes(storage.nbytes)}"
    return [
        Result("register_80_layers", value * 1e3, "ms", limit * 1e3, value / limit, f"{about}; limit: as one tensor"),
        Result("register_80_layers_opens", max(opens), "opens", about="mappings made for them, the most of all runs"),
        rate_result("mapped_read", storage.nbytes, read["mapped_s"], read["local_s"], "limit: a copy of local memory"),
    ]


@contextlib.contextmanager
def _peer(config: IpcBenchConfig, folder: pathlib.Path) -> Iterator[tuple[LineProcess, socket.socket]]:
    """The importing process and the socket to it."""
    path = folder / "peer.sock"
    with LineProcess("importer", "kvferry.cli.bench_peer") as child, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(60)
        child.begin(Connect(path=str(path), device=config.device))
        with listener.accept()[0] as sock:
            child.finish()
            yield child, sock


def _time_mapping(child: LineProcess, sock: socket.socket, tensors: Sequence[torch.Tensor]) -> tuple[float, int]:
    """Seconds from the first wrap here to the last mapped tensor there, and the mappings that were opened for it."""
    child.begin(Map())
    started = time.monotonic_ns()
    with contextlib.ExitStack() as stack:
        wrappers = [stack.enter_context(ipc.wrap(tensor)) for tensor in tensors]
        ipc.send(sock, wrappers)
        reply = child.finish()
        child.call(Drop())
    return (reply["finished_ns"] - started) / 1e9, reply["opens"]


def _read_mapped(child: LineProcess, sock: socket.socket, storage: torch.Tensor, repeats: int) -> dict[str, float]:
    child.begin(Map())
    with ipc.wrap(storage) as wrapper:
        ipc.send(sock, [wrapper])
        child.finish()
        times = child.call(Read(repeats=repeats))
        child.call(Drop())
    return times


def _bench_memory_back(config: IpcBenchConfig, folder: pathlib.Path) -> list[Result]:
    """Kill engines that hold registered KV, one after another."""
    with ServerProcess(folder / "server.sock", 64 << 20, config.device) as server:
        times = _kill_engines(config, server, config.kills)
    alone = _kill_engines(config, None, 2) if config.device == "cuda" else []
    limit = statistics.median(alone) if alone else None
    value = max(times)
    about = f"worst of {len(times)} kills, median {statistics.median(times):.1f} ms, of engines that hold "
    about += format_bytes(config.held_bytes) + ("" if limit is None else "; limit: engines that share with nobody")
    return [Result("memory_back", value, "ms", limit, None if limit is None else value / limit, about)]


def _kill_engines(config: IpcBenchConfig, server: ServerProcess | None, count: int) -> list[float]:
    """Milliseconds from each kill to all memory back. Raises `DeadlineError` where some does not come back."""
    token_bytes = 2 * HOLDER_MODEL.num_layers * HOLDER_MODEL.num_kv_heads * HOLDER_MODEL.head_dim
    token_bytes *= 2 if config.device == "cuda" else 4
    engine = EngineConfig(HOLDER_MODEL, PagedConfig(max(1, config.held_bytes // token_bytes // 16)), config.device)
    url = None if server is None else server.url
    times = []
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(EngineProcess(f"holder {index}")) for index in range(count)]
        for index, holder in enumerate(holders):
            holder.begin(Init(engine=engine, engine_id=f"holder-{index}", server=url))
        ready = [holder.finish() for holder in holders]
        for holder, facts in zip(holders, ready, strict=True):
            pids = (holder.pid,) if server is None else (holder.pid, server.pid)
            held = find_held(config.device, pids, facts["device_bytes"])
            back = measure_memory_back(held, holder.send_kill)
            if back.ms is None:
                raise DeadlineError(
                    f"{format_bytes(back.num_bytes)} of {format_bytes(held.num_bytes)} came back after a kill"
                )
            times.append(back.ms)
    return times
