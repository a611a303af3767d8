"""Which wrapper a tensor gets."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvferry.cuda import memory
from kvferry.cuda.memory import MemoryKind, PointerInfo
from kvferry.errors import NotContiguousError, UnsupportedMemoryError
from kvferry.ipc import policy as policy_module
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.policy import IPCPolicy, wrap
from kvferry.ipc.raw import RawCudaIPCWrapper
from kvferry.ipc.shared_memory import allocate_shared
from kvferry.ipc.torch_storage import CudaIPCWrapper
from kvferry.ipc.vmm import VmmCudaIPCWrapper
from kvferry.ipc.wrapper import DeviceIPCWrapper


@pytest.mark.parametrize(
    ("isolated_ipc", "use_vmm_api", "wrapper", "kind"),
    [
        (False, False, "torch", CudaIPCWrapper),
        (True, False, "raw", RawCudaIPCWrapper),
        (False, True, "vmm", VmmCudaIPCWrapper),
        (True, True, "vmm", VmmCudaIPCWrapper),
    ],
)
def test_the_two_switches(isolated_ipc: bool, use_vmm_api: bool, wrapper: str, kind: type[DeviceIPCWrapper]) -> None:
    policy = IPCPolicy.from_switches(isolated_ipc=isolated_ipc, use_vmm_api=use_vmm_api)
    assert policy == IPCPolicy(wrapper, isolated_ipc)
    assert policy.choose(torch.zeros(1)) is kind


@pytest.mark.parametrize("name", ["", "cuda", "Raw", "auto "])
def test_an_unknown_name_lists_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match="auto, torch, raw, vmm, host"):
        IPCPolicy(name)


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        IPCPolicy().wrapper = "raw"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [
        (MemoryKind.HOST, HostIPCWrapper),
        (MemoryKind.PINNED, HostIPCWrapper),
        (MemoryKind.LEGACY, RawCudaIPCWrapper),
        (MemoryKind.VMM, VmmCudaIPCWrapper),
    ],
)
def test_auto_follows_the_driver(
    kind: MemoryKind, wrapper: type[DeviceIPCWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "pointer_info", lambda _: PointerInfo(kind))
    assert IPCPolicy().choose(torch.zeros(1)) is wrapper


@pytest.mark.parametrize("kind", [MemoryKind.MANAGED, MemoryKind.POOL])
def test_auto_refuses_what_no_wrapper_can_share(kind: MemoryKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "pointer_info", lambda _: PointerInfo(kind))
    with pytest.raises(UnsupportedMemoryError, match="allocate"):
        wrap(torch.zeros(1))


def test_wrap_shares_host_memory_and_says_why_not() -> None:
    assert memory.pointer_info(torch.zeros(1).data_ptr()).kind is MemoryKind.HOST
    tensor = allocate_shared((4, 4))
    with wrap(tensor) as wrapper:
        assert type(wrapper) is HostIPCWrapper
    with wrap(tensor, IPCPolicy("host")) as wrapper:
        assert type(wrapper) is HostIPCWrapper
    with pytest.raises(UnsupportedMemoryError, match="rehome"):
        wrap(torch.zeros(4))
    with pytest.raises(NotContiguousError):
        wrap(tensor[:, 1:])


@pytest.mark.parametrize("name", ["torch", "raw", "vmm"])
def test_a_named_wrapper_is_not_replaced_by_one_that_would_work(name: str) -> None:
    with pytest.raises(UnsupportedMemoryError):
        wrap(allocate_shared((4,)), IPCPolicy(name))


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(3, device="meta")], ids=["empty", "meta"])
def test_tensors_without_bytes_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedMemoryError, match="no bytes"):
        wrap(tensor)
