"""What SGLang needs to run on a CPU where it has kernels for GPUs alone. Copies only; nothing of the logic."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch


def prepare() -> None:
    """Once, in the process that forks the engines, after SGLang's import."""
    from sglang.srt.mem_cache.pool_host import base, common, mha
    from sglang.srt.mem_cache.pool_host import mla as mla_module

    common._cuda_host_register = base._cuda_host_unregister = lambda *_: None
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = _load_layer
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up
    mla_module.MLATokenToKVPoolHost.load_to_device_per_layer = _load_latents
    mla_module.MLATokenToKVPoolHost.backup_from_device_all_layer = _back_up_latents
    torch.cpu.Stream.synchronize = lambda stream: None  # type: ignore[attr-defined]
    torch._dynamo.config.disable = True
    # An engine's processes are forked from one that has SGLang: importing it anew takes longer than all the rest.
    set_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_method("fork", force=True)


def _tokens(pool: Any, data: torch.Tensor, layer: int) -> torch.Tensor:
    """One layer of a host pool as `[tokens, ...]`, or `[pages, tokens of a page, ...]`, in place."""
    if pool.layout == "layer_first":
        return data[layer]
    if pool.layout == "page_first":
        return data[:, layer]
    if pool.layout == "page_head":
        return data[:, :, :, layer].transpose(1, 2)
    return data[:, layer]


def _move(pool: Any, data: torch.Tensor, layer: int, host: torch.Tensor, rows: torch.Tensor | None) -> Any:
    """Those tokens of the host pool; or put `rows` there."""
    view = _tokens(pool, data, layer)
    paged = pool.layout in ("page_first_direct", "page_head")
    places: Any = (host // pool.page_size, host % pool.page_size) if paged else (host,)
    if rows is None:
        return view[places]
    view[places] = rows
    return None


def _load_layer(
    self: Any, device_pool: Any, host: torch.Tensor, device: torch.Tensor, layer: int, backend: str, **_: Any
) -> None:
    for target, data in ((self.device_k_buffers, self.k_buffer), (self.device_v_buffers, self.v_buffer)):
        target[layer][device] = _move(self, data, layer, host.cpu(), None).view(target[layer][device].shape)


def _back_up(self: Any, device_pool: Any, host: torch.Tensor, device: torch.Tensor, backend: str) -> None:
    for layer in range(self.layer_num):
        for source, data in ((self.device_k_buffers, self.k_buffer), (self.device_v_buffers, self.v_buffer)):
            _move(self, data, layer, host.cpu(), source[layer][device])


def _load_latents(
    self: Any, device_pool: Any, host: torch.Tensor, device: torch.Tensor, layer: int, backend: str, **_: Any
) -> None:
    target = self.device_kv_buffers[layer]
    target[device] = _move(self, self.kv_buffer, layer, host.cpu(), None).view(target[device].shape)


def _back_up_latents(self: Any, device_pool: Any, host: torch.Tensor, device: torch.Tensor, backend: str) -> None:
    for layer in range(self.layer_num):
        _move(self, self.kv_buffer, layer, host.cpu(), self.device_kv_buffers[layer][device])
