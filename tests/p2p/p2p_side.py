"""A p2p engine in a child process, as commands, with KV caches whose blocks have bytes that tell what they are."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

from doubles import copy_kernel, fake_cuda
from doubles.nccl_double import NcclDouble
from kvferry.cuda.device import bound
from kvferry.cuda.memory import pointer_info, tensor_from_pointer
from kvferry.errors import TransferError
from kvferry.ipc import rehome
from kvferry.p2p import P2pConfig, P2pNcclEngine, Receiving, Sending
from kvferry.p2p.carriers.pushes.gpu_copies import GpuCopies
from kvferry.p2p.carriers.pushes.run import Part

BLOCK_SIZE = 16
HEAD_DIM = 32
FORMAT = "vllm_flash_attention"


def make_caches(
    num_blocks: int = 64, num_layers: int = 4, heads: int = 2, seed: int = 0, shared: bool = False
) -> dict[str, torch.Tensor]:
    """Layers of `[2, num_blocks, 16, heads, 32]`, random by the seed; `shared`: in memory that others can map."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, num_blocks, BLOCK_SIZE, heads, HEAD_DIM)
    caches = {
        f"layer.{layer}": torch.randint(0, 0x7C00, shape, dtype=torch.int16, generator=generator).view(torch.float16)
        for layer in range(num_layers)
    }
    if shared:
        rehome(list(caches.values()))
    return caches


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def on_fake_gpu(caches: dict[str, torch.Tensor], device: int) -> dict[str, torch.Tensor]:
    """The same caches in memory of a GPU of the driver's double."""
    moved = {}
    for name, cache in caches.items():
        moved[name] = fake_gpu_bytes(cache.numel() * cache.element_size(), device).view(cache.dtype).view(cache.shape)
        moved[name].copy_(cache)
    return moved


def fake_gpu_bytes(nbytes: int, device: int) -> torch.Tensor:
    """Memory of a GPU of the driver's double, that stays."""
    with bound(device) as drv:
        return tensor_from_pointer(drv.mem_alloc(max(1, nbytes)), max(1, nbytes), device=device, owner=None)[:nbytes]


class P2pSide:
    """One engine. `fake_gpu` has its caches on that one of two GPUs of the driver's double, `gpu` on a real one.

    `nccl` is the path of NCCL's double, and `nccl_env` what it is told to do.
    """

    def __init__(
        self,
        caches: dict[str, Any] | None = None,
        fake_gpu: int | None = None,
        gpu: int | None = None,
        nccl: str | None = None,
        nccl_env: dict[str, str] | None = None,
        **config: Any,
    ) -> None:
        os.environ.update(nccl_env or {})
        self.driver: fake_cuda.FakeDriver | None = None
        self._ends = contextlib.ExitStack()
        if fake_gpu is not None:
            self.driver = self._ends.enter_context(fake_cuda.installed((0, 1)))
            copy_kernel.install(self.driver)
            if nccl is not None:
                os.environ["KVFERRY_NCCL_SO_PATH"] = nccl
                self._double = NcclDouble(Path(nccl), self.driver)
        self.engine = P2pNcclEngine(P2pConfig(**{"kv_buffer_size": 16 << 20, "heartbeat_s": 1.0, **config}))
        self.caches: dict[str, torch.Tensor] = {}
        self.transfers: dict[str, Sending | Receiving] = {}
        self.kept: list[torch.Tensor] = []
        self.gpus = (fake_gpu, gpu)
        self.gathered_bytes = 0
        self.used_late = torch.empty(0)
        if caches is not None:
            self.caches = make_caches(**caches)
            if fake_gpu is not None:
                self.caches = on_fake_gpu(self.caches, fake_gpu)
            elif gpu is not None:
                self.caches = {name: cache.to(f"cuda:{gpu}") for name, cache in self.caches.items()}
            self.engine.register_kv_caches(self.caches, format=FORMAT)
            self._count_gathers()

    def address(self) -> dict[str, Any]:
        return {"address": self.engine.address}

    def digest(self, blocks: list[int]) -> dict[str, Any]:
        """What lies in these blocks, over all layers."""
        found = hashlib.sha256()
        for cache in self.caches.values():
            found.update(cache[:, blocks].contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return {"digest": found.hexdigest()}

    def send(self, name: str, blocks: list[int], to: Any = None, **options: Any) -> None:
        self.transfers[f"send {name}"] = self.engine.send_blocks(name, blocks, to, **options)

    def receive(self, name: str, blocks: list[int], source: Any = None, within_s: float = 40, **options: Any) -> None:
        receiving = self.engine.receive_blocks(name, blocks, source, timeout_s=within_s, **options)
        self.transfers[f"receive {name}"] = receiving

    def layer_ready(self, name: str, layer: int) -> None:
        sending = self.transfers[f"send {name}"]
        assert isinstance(sending, Sending)
        sending.layer_ready(layer)

    def wait_layer(self, name: str, layer: int) -> None:
        receiving = self.transfers[f"receive {name}"]
        assert isinstance(receiving, Receiving)
        receiving.wait_layer(layer, 30)

    def wait(self, what: str, within_s: float = 30) -> dict[str, Any]:
        """The code of the error that a transfer ended with, None where there is none."""
        try:
            self.transfers[what].wait(within_s)
        except TransferError as error:
            return {"code": error.code}
        return {"code": None}

    def write_late(self, blocks: list[int], value: float) -> None:
        """Have the GPU write these blocks, some tenths of a second from now."""
        torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
        for cache in self.caches.values():
            cache[:, blocks] = value

    def values(self, blocks: list[int]) -> dict[str, Any]:
        """All different values that these blocks hold."""
        found = [cache[:, blocks].flatten().cpu().tolist() for cache in self.caches.values()]
        return {"values": sorted({value for values in found for value in values})}

    def problem(self, what: str) -> dict[str, Any]:
        """What the error of a transfer that has ended says."""
        return {"problem": str(self.transfers[what].error)}

    def done(self, what: str) -> dict[str, Any]:
        return {"done": self.transfers[what].done()}

    def send_tensor(self, name: str, nbytes: int, seed: int, to: str | None = None, on_host: bool = True) -> None:
        tensor = random_bytes(nbytes, seed)
        if not on_host:
            tensor = self._on_gpu(nbytes).copy_(tensor)
        self.transfers[f"send {name}"] = self.engine.send_tensor(name, tensor, to)

    def recv_tensor(
        self, name: str, seed: int, within_s: float = 30, keep: bool = False, into: Any = None, source: Any = None
    ) -> dict[str, Any]:
        """Whether it is what was sent, and where it lies; `into`: bytes of a tensor of ones own, on "gpu" or "host"."""
        out = None
        if into is not None:
            out = self._on_gpu(into[1]) if into[0] == "gpu" else torch.empty(into[1], dtype=torch.uint8)
        tensor = self.engine.recv_tensor(name, source, timeout_s=within_s, out=out)
        if keep:
            self.kept.append(tensor)
        equal = torch.equal(tensor.cpu(), random_bytes(tensor.numel(), seed))
        gpu = pointer_info(tensor.data_ptr()).device if tensor.numel() else None
        return {"equal": equal, "nbytes": tensor.numel(), "gpu": gpu, "device": tensor.device.type}

    def send_late(self, name: str, nbytes: int, seed: int, to: str) -> None:
        """A tensor that the GPU writes only some tenths of a second from now."""
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{self.gpus[1]}")
        wanted = random_bytes(nbytes, seed).to(tensor.device)
        torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
        tensor.copy_(wanted)
        self.transfers[f"send {name}"] = self.engine.send_tensor(name, tensor, to)

    def use_late(self) -> None:
        """Let the GPU copy the tensor that is kept some tenths of a second from now, and keep it no longer."""
        tensor = self.kept.pop()
        torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
        self.used_late = tensor.clone()

    def used(self, seed: int) -> dict[str, Any]:
        """Whether what was copied late is what had come."""
        return {"equal": torch.equal(self.used_late.cpu(), random_bytes(self.used_late.numel(), seed))}

    def send_many(self, count: int, nbytes: int, to: str) -> None:
        tensor = self._on_gpu(nbytes).copy_(random_bytes(nbytes, 1))
        for number in range(count):
            self.engine.send_tensor(f"many {number}", tensor, to).wait(30)

    def recv_many(self, count: int) -> None:
        for number in range(count):
            self.engine.recv_tensor(f"many {number}", timeout_s=30)

    def drop(self) -> None:
        """All tensors that were kept, the oldest first."""
        while self.kept:
            self.kept.pop(0)

    def gpu_bytes(self) -> dict[str, Any]:
        """What the process holds of its GPU, as torch and the driver count it."""
        gpu = self.gpus[1]
        assert gpu is not None
        free, _ = torch.cuda.mem_get_info(gpu)
        return {"free": free, "allocated": torch.cuda.memory_stats(gpu)["allocation.all.allocated"]}

    def _on_gpu(self, nbytes: int) -> torch.Tensor:
        fake, real = self.gpus
        if fake is not None:
            return fake_gpu_bytes(nbytes, fake)
        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{real}")

    def cancel(self, what: str) -> None:
        self.transfers[what].cancel()

    def withdraw(self, name: str, to: Any = None) -> None:
        self.engine.withdraw(name, to)

    def gathered(self) -> dict[str, Any]:
        """Bytes that went into the slots of the NCCL ring."""
        return {"nbytes": self.gathered_bytes}

    def reject(self, name: str, address: str | None = None) -> None:
        self.engine.reject(name, address)

    def stats(self) -> dict[str, Any]:
        return {"stats": self.engine.stats()}

    def usage(self) -> dict[str, Any]:
        """Threads, and resident bytes."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"threads": threading.active_count(), "rss": pages * 4096}

    def _count_gathers(self) -> None:
        start = GpuCopies.start

        def counting(copies: GpuCopies, part: Part, slot: int, *, to_flat: bool) -> None:
            self.gathered_bytes += part.nbytes if to_flat else 0
            start(copies, part, slot, to_flat=to_flat)

        GpuCopies.start = counting  # type: ignore[method-assign,assignment]

    def driver_calls(self) -> dict[str, Any]:
        """How often functions of the driver's double were called."""
        assert self.driver is not None
        return {"calls": dict(self.driver.fake.calls)}

    def fork(self) -> dict[str, Any]:
        """A child that only sleeps, with all that this process has open."""
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        return {"pid": pid}

    def close(self) -> None:
        self.engine.close()
        self._ends.close()
