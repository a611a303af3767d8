"""One of the two vLLM engines of benchmarks/vllm_pd.py, with P2pNcclConnector or NixlConnector."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import time
from typing import Any

import torch
from vllm_engine_base import EngineChild, serve

import kvferry

CACHE_BYTES = 16 << 30  # 131,072 tokens of the 8B shape
UTILIZATION = 0.2  # what has to be free at the start, of all: the engines of several kinds share a GPU


class GpuClock:
    """When the GPU got somewhere, by the host's monotonic clock; on a CPU all is done when it is said."""

    def __init__(self) -> None:
        self._base: tuple[torch.cuda.Event, float] | None = None

    def set(self) -> None:
        """Compare both clocks, while the GPU has nothing to do: to within some 10 us."""
        if not torch.cuda.is_available():
            return
        shortest = math.inf
        for _ in range(5):
            began, event = time.monotonic(), torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
            now = time.monotonic()
            if now - began < shortest:
                shortest, self._base = now - began, (event, now)

    def mark(self) -> torch.cuda.Event | float:
        """Where the current stream is."""
        if not torch.cuda.is_available():
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event | float) -> float:
        """When that was done; waits for it."""
        if isinstance(mark, float):
            return mark
        assert self._base is not None
        mark.synchronize()
        event, base_s = self._base
        return base_s + float(event.elapsed_time(mark)) / 1e3


class PeerChild(EngineChild):
    """The engine, and when its transfers began and ended."""

    def __init__(self, folder: str, cpu: bool, connector: dict[str, Any]) -> None:
        super().__init__(
            folder,
            cpu,
            connector,
            block_size=16,
            kv_cache_memory_bytes=CACHE_BYTES,
            gpu_memory_utilization=UTILIZATION,
        )
        self._clock = GpuClock()
        self._transfers: list[dict[str, Any]] = []  # received by the request under way
        self._last_layers: list[torch.cuda.Event | float] = []  # of what it sends
        self._engine: Any = None
        cache = self._scheduler.kv_cache_config
        self._block_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
        if connector["kv_connector"] == "P2pNcclConnector":
            self._watch_ours()
        else:
            self._watch_nixl()

    def info(self) -> dict[str, Any]:
        sides = {} if self._engine is None else {"addresses": self._scheduler.connector._scheduler.own_addresses}
        versions = {"kvferry": kvferry.__version__, "nixl": _version("nixl"), "cuda": torch.version.cuda}
        return {**super().info(), **versions, **sides, "block_bytes": self._block_bytes}

    def warm(self, lengths: list[int]) -> dict[str, Any]:
        """Compute prompts of these lengths, which may compile kernels."""
        for length in lengths * 2:
            self.generate(time.monotonic_ns(), length, 4)
        return {}

    def request(self, seed: int, length: int, tokens: int, params: dict[str, Any]) -> dict[str, Any]:
        """A request with kv_transfer_params."""
        self._transfers.clear()
        self._last_layers.clear()
        self._clock.set()
        found = self.generate(seed, length, tokens, extra_args={"kv_transfer_params": params})
        last = [self._clock.seconds(mark) for mark in self._last_layers]
        return {**found, "transfers": list(self._transfers), "last_layer_s": last[-1] if last else None}

    def take_any_kv(self) -> dict[str, Any]:
        """For the control: let KV of another prompt come, which ours would refuse."""
        scheduler: Any = importlib.import_module("kvferry.connectors.vllm.p2p.scheduler")
        scheduler.tag_of = lambda request: b""
        return {}

    def peers(self) -> dict[str, Any]:
        """What moves the KV, as KVferry's engine says."""
        stats = {} if self._engine is None else self._engine.stats()
        return {name: stats[name] for name in ("peers", "fallbacks", "not_offered", "refused") if name in stats}

    def _watch_ours(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        engine = self._engine = get_kv_transfer_group()._worker._engine
        if engine is None:
            raise RuntimeError("P2pNcclConnector hands over no KV here, see its log")
        send, receive = engine.send_blocks, engine.receive_blocks
        num_layers = len(engine._caches().layers)

        def sent(*args: Any, **kwargs: Any) -> Any:
            sending = send(*args, **kwargs)
            layer_ready, ready = sending.layer_ready, set()

            def noted(layer: int) -> None:
                if layer not in ready:
                    ready.add(layer)
                    if len(ready) == num_layers:
                        self._last_layers.append(self._clock.mark())
                layer_ready(layer)

            sending.layer_ready = noted
            return sending

        def received(transfer_id: str, block_ids: Any, *args: Any, **kwargs: Any) -> Any:
            found: dict[str, Any] = {"bytes": len(block_ids) * self._block_bytes, "began_s": time.monotonic()}
            receiving = receive(transfer_id, block_ids, *args, **kwargs)

            def ended(transfer: Any) -> None:
                found["landed_s"] = time.monotonic()
                found["ms"] = (found["landed_s"] - found["began_s"]) * 1e3
                found["error"] = None if transfer.error is None else str(transfer.error)
                self._transfers.append(found)

            receiving.add_done_callback(ended)
            return receiving

        engine.send_blocks, engine.receive_blocks = sent, received

    def _watch_nixl(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

        record = NixlKVConnectorStats.record_transfer

        def recorded(stats: Any, telemetry: Any) -> Any:
            found = {"bytes": telemetry.totalBytes, "copies": telemetry.descCount, "error": None}
            found |= {"post_ms": telemetry.postDuration / 1e3, "copy_ms": telemetry.xferDuration / 1e3}
            self._transfers.append({**found, "ms": found["post_ms"] + found["copy_ms"]})
            return record(stats, telemetry)

        NixlKVConnectorStats.record_transfer = recorded


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    serve(PeerChild)
