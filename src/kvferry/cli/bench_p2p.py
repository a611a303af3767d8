"""`kvferry bench p2p`: paged KV from engine to engine, until it is in place, beside the raw carrier.

The receiving engine is in this process, the sending one in another; with two GPUs each has its own. A transfer is timed
from the receiver's call to the end of its wait, so that asking, granting and telling of each layer count; the rate of
several is that from the first call to the end of the last wait. Every byte is checked once for each block size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import socket
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from types import MappingProxyType

import numpy as np
import torch

from kvferry import ipc
from kvferry.cli.bench_p2p_peer import (
    FORMAT,
    HEAD_BYTES,
    WAIT_S,
    Early,
    Init,
    Keep,
    Last,
    Nccl,
    Register,
    Shape,
    Share,
    Stream,
)
from kvferry.cli.bench_report import Result, median_time_s, rate_result
from kvferry.cli.sizes import format_bytes
from kvferry.cuda.device import device_uuid
from kvferry.errors import KVFerryError
from kvferry.p2p import P2pConfig, P2pNcclEngine, Receiving
from kvferry.p2p.nccl import NcclLauncher, NCCLLibrary, NcclSettings
from kvferry.reference.process import LineProcess

__all__ = ["P2pBenchConfig", "run_bench_p2p"]

KIB, MIB = 1 << 10, 1 << 20
_LIMITS = MappingProxyType(
    {
        "ipc": "a plain copy from the peer's memory",
        "nccl": "ncclRecv of the same bytes at once, by a communicator with the same settings",
        "host": "a plain TCP socket",
    }
)
_WARM = 2
_AT_ONCE = 8  # an engine that serves has several transfers under way
_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class P2pBenchConfig:
    """Transfers of `sizes_bytes`, ascending, in blocks that lie in runs of `piece_bytes`.

    Several of the largest size at once in runs of 64 KiB, or else in the last of `piece_bytes`, shuffled, are reported
    as the carrier's own figure.
    """

    device: str
    carrier: str
    sizes_bytes: tuple[int, ...]
    piece_bytes: tuple[int, ...] = (16 * KIB, 64 * KIB, 256 * KIB)
    num_layers: int = 32
    repeats: int = 9

    def __post_init__(self) -> None:
        if self.carrier not in _LIMITS:
            raise ValueError(f"carrier {self.carrier!r} cannot be measured: choose one of {', '.join(_LIMITS)}")
        if self.carrier == "nccl" and self.device != "cuda":
            raise ValueError("NCCL moves GPU memory: it is measured with --device cuda, on two GPUs")
        odd = [size for size in self.piece_bytes if size <= 0 or size % HEAD_BYTES]
        if odd or not self.piece_bytes:
            raise ValueError(f"block sizes {odd}: each must be a multiple of {format_bytes(HEAD_BYTES)}, one head's")
        largest = 2 * self.num_layers * max(self.piece_bytes)
        if not self.sizes_bytes or min(self.sizes_bytes) < largest:
            raise ValueError(f"sizes start at {format_bytes(largest)}, one block of all layers")

    @classmethod
    def for_device(cls, device: str, carrier: str) -> P2pBenchConfig:
        if device == "cuda":
            return cls(device, carrier, (64 * MIB, 1024 * MIB))
        return cls(device, carrier, (16 * MIB, 128 * MIB), num_layers=8, repeats=5)

    @property
    def main_piece(self) -> int:
        """The block size of the figure that bears the carrier's name alone."""
        return 64 * KIB if 64 * KIB in self.piece_bytes else self.piece_bytes[-1]


def run_bench_p2p(config: P2pBenchConfig) -> list[Result]:
    """All figures. The child has ended when this returns or raises."""
    with _Pair(config) as pair:
        results = list(_bench_all(config, pair))
    name = f"p2p_{config.carrier}"
    results.sort(key=lambda result: result.name != name)  # the figure of that name first
    return results


def _bench_all(config: P2pBenchConfig, pair: _Pair) -> Iterator[Result]:
    limits = {size: min(pair.raw_s(size) for _ in range(2)) for size in config.sizes_bytes}
    for piece, ordered in itertools.product(config.piece_bytes, (False, True)):
        pair.register(piece, _AT_ONCE * config.sizes_bytes[-1])
        for size, at_once in itertools.product(config.sizes_bytes, (1, _AT_ONCE)):
            taken_s, nbytes = pair.transfer_s(size, ordered=ordered, at_once=at_once)
            main = (piece, size, at_once, ordered) == (config.main_piece, config.sizes_bytes[-1], _AT_ONCE, False)
            sizes = format_bytes(size) if at_once == 1 else f"{at_once} x {format_bytes(size)}"
            parts = [sizes, format_bytes(piece), "neighbours" if ordered else "shuffled"]
            suffix = "" if main else "_" + "_".join(parts).replace(" ", "_").lower()
            about = f"{sizes} at once, in runs of {parts[1]}, {parts[2]} block ids; {pair.where}; limit: "
            about += _LIMITS[config.carrier]
            yield rate_result(f"p2p_{config.carrier}{suffix}", nbytes, taken_s, limits[size] * nbytes / size, about)
        if piece == config.main_piece and not ordered:
            yield from pair.latencies()


class _Pair(contextlib.ExitStack):
    """Both engines, the sender in a child."""

    def __init__(self, config: P2pBenchConfig) -> None:
        super().__init__()
        self._config = config
        self._device, other = config.device, config.device
        if config.device == "cuda":
            self._device, other = "cuda:0", f"cuda:{min(1, torch.cuda.device_count() - 1)}"
        self.where = "within host memory" if config.device == "cpu" else f"from {other} to {self._device}"
        self._folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
        self._child = self.enter_context(LineProcess("sender", "kvferry.cli.bench_p2p_peer"))
        begun = self._child.call(Init(device=other, carrier=config.carrier))
        self._address, self._peer_uuid = begun["address"], begun["uuid"]
        self._engine = self.enter_context(P2pNcclEngine(P2pConfig(carrier=config.carrier, kv_buffer_size=1 << 20)))
        self._caches: dict[str, torch.Tensor] = {}
        self._shape = Shape(1, 1, HEAD_BYTES)
        self._random = np.random.default_rng(0)
        self._names = map("transfer {}".format, itertools.count())

    def register(self, piece_bytes: int, max_bytes: int) -> None:
        """New caches on both sides, a quarter larger than what is sent."""
        self._caches = {}
        block_bytes = 2 * self._config.num_layers * piece_bytes
        shape = self._shape = Shape(self._config.num_layers, max_bytes // block_bytes * 5 // 4 + 8, piece_bytes)
        self._child.call(Register(shape=shape), timeout_s=120)
        self._caches = shape.make(self._device)
        self._engine.register_kv_caches(self._caches, format=FORMAT)

    def transfer_s(self, size: int, *, ordered: bool, at_once: int = 1) -> tuple[float, int]:
        """The median time of some transfers of about that size, and their bytes in all. The last are checked.

        Where there are several at once, one begins whenever one has ended, `_ROUNDS` times.
        """
        blocks = size // self._shape.block_bytes
        rounds = _ROUNDS if at_once > 1 else 1
        repeats = -(-self._config.repeats // rounds)
        times = []
        for _ in range(_WARM + repeats):
            source, target = (self._ids(blocks * at_once, ordered) for _ in range(2))
            parts = [slice(place * blocks, (place + 1) * blocks) for place in range(at_once)]
            names = [(next(self._names), part) for part in parts * rounds]
            for name, part in names:
                self._child.call(Keep(name=name, ids=source[part]))
            times.append(self._receive_s([(name, target[part]) for name, part in names], at_once))
        self._check(source, target)
        return statistics.median(times[_WARM:]), rounds * at_once * blocks * self._shape.block_bytes

    def _receive_s(self, transfers: list[tuple[str, list[int]]], at_once: int) -> float:
        under_way: deque[Receiving] = deque()
        started = time.perf_counter()
        for name, target in transfers:
            if len(under_way) == at_once:
                under_way.popleft().wait()
            under_way.append(self._engine.receive_blocks(name, target, self._address, timeout_s=WAIT_S))
        for receiving in under_way:
            receiving.wait()
        return time.perf_counter() - started

    def latencies(self) -> Iterator[Result]:
        """One block of all layers; and the last layer of a transfer whose others have landed."""
        prefix = f"p2p_{self._config.carrier}"
        one, nbytes = self.transfer_s(self._shape.block_bytes, ordered=False)
        yield Result(f"{prefix}_latency", one * 1e3, "ms", about=f"one block of all layers, {format_bytes(nbytes)}")
        blocks = self._config.sizes_bytes[-1] // self._shape.block_bytes
        times = [self._last_layer_s(blocks) for _ in range(_WARM + self._config.repeats)][_WARM:]
        about = f"from the last of {self._shape.num_layers} layers computed to its last byte landed, "
        about += f"{format_bytes(blocks * 2 * self._shape.piece_bytes)} a layer; the other layers have landed by then"
        yield Result(f"{prefix}_last_layer", statistics.median(times) * 1e3, "ms", about=about)

    def _last_layer_s(self, blocks: int) -> float:
        name = next(self._names)
        self._child.call(Keep(name=name, ids=self._ids(blocks, False), layer_wise=True))
        receiving = self._engine.receive_blocks(name, self._ids(blocks, False), self._address, timeout_s=WAIT_S)
        self._child.call(Early(name=name))
        for layer in range(self._shape.num_layers - 1):
            receiving.wait_layer(layer, WAIT_S)
        self._child.begin(Last(name=name))
        receiving.wait()
        finished = time.monotonic_ns()
        return float(finished - self._child.finish()["started_ns"]) / 1e9

    def raw_s(self, size: int) -> float:
        """The median time of the raw carrier with so many bytes in one piece."""
        return {"ipc": self._copy_s, "nccl": self._nccl_s, "host": self._socket_s}[self._config.carrier](size)

    def _nccl_s(self, size: int) -> float:
        library = NCCLLibrary()
        unique_id = bytes(library.ncclGetUniqueId())
        target = torch.zeros(size, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(target.device)
        launcher = NcclLauncher(library, 0, NcclSettings())
        try:
            repeats = self._config.repeats + 1
            command = Nccl(unique_id=unique_id, peer_uuid=device_uuid(0), nbytes=size, repeats=repeats)
            self._child.begin(command)
            joining = launcher.connect(unique_id, 0, peer_device_uuid=self._peer_uuid, name="the sender")
            comm = joining.result(WAIT_S)

            def receive() -> None:
                comm.exchange(receives=[(target.data_ptr(), size)], timeout_s=WAIT_S).result(WAIT_S)

            receive()
            taken = median_time_s(receive, self._config.repeats)
            self._child.finish()
        finally:
            launcher.close()
        return taken

    def _copy_s(self, size: int) -> float:
        path = self._folder / f"share {next(self._names)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(WAIT_S)
            self._child.begin(Share(path=str(path), nbytes=size))
            with listener.accept()[0] as sock:
                (wrapper,) = ipc.recv(sock)
            self._child.finish()
        with wrapper:
            source = wrapper.to_tensor()
            target = torch.zeros(size, dtype=torch.uint8, device=self._device)

            def copy() -> None:
                target.copy_(source)
                if target.is_cuda:
                    torch.cuda.synchronize(target.device)

            copy()
            return median_time_s(copy, self._config.repeats)

    def _socket_s(self, size: int) -> float:
        buffer = memoryview(bytearray(size))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(WAIT_S)
            repeats = self._config.repeats + 1
            self._child.begin(Stream(port=listener.getsockname()[1], nbytes=size, repeats=repeats))
            with listener.accept()[0] as sock:
                sock.settimeout(WAIT_S)

                def receive() -> None:
                    sock.sendall(b"x")
                    done = 0
                    while done < size:
                        done += sock.recv_into(buffer[done:])

                receive()
                taken = median_time_s(receive, self._config.repeats)
            self._child.finish()
        return taken

    def _ids(self, blocks: int, ordered: bool) -> list[int]:
        ids = self._random.permutation(self._shape.num_blocks)[:blocks]
        first = int(ids[0]) % (self._shape.num_blocks - blocks + 1)
        found: list[int] = list(range(first, first + blocks)) if ordered else ids.tolist()
        return found

    def _check(self, source: list[int], target: list[int]) -> None:
        """Raise KVFerryError unless each block is the one that was sent; then make all as they were."""
        values = (torch.tensor(source, device=self._device) % 251).to(torch.bfloat16).view(1, -1, 1, 1, 1)
        own = (torch.tensor(target, device=self._device) % 251).to(torch.bfloat16).view(1, -1, 1, 1, 1)
        for name, cache in self._caches.items():
            if not bool((cache[:, target] == values).all()):
                raise KVFerryError(f"wrong bytes arrived in {name}: this is a fault of KVferry, please report it")
            cache[:, target] = own.expand_as(cache[:, target])
