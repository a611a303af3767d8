"""The torch wrapper as far as it goes without a GPU: what travels, what is refused, the alias. The rest is in gpu/."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from doubles.fake_cuda import FakeDriver, installed
from doubles.side import pattern
from doubles.vmm_pool import VmmPool
from kvferry.cuda.device import bound
from kvferry.cuda.memory import pointer_info, tensor_from_pointer
from kvferry.errors import StaleHandleError, UnsupportedMemoryError
from kvferry.ipc.torch_storage import CudaIPCWrapper, TorchStorageDescriptor

COUNTER = b"/torch_123_456_0"


@pytest.fixture
def double() -> Iterator[FakeDriver]:
    with installed() as driver:
        yield driver


@pytest.fixture
def shared(double: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """4 KiB of the double's memory whose storage torch can "share"."""
    with bound(0) as drv:
        address = drv.mem_alloc(4096)
    tensor = tensor_from_pointer(address, 4096, device=0, owner=None)
    tensor.copy_(pattern(4096, 1))

    def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
        start = storage.data_ptr() - pointer_info(storage.data_ptr()).base
        return (0, b"\x02c" + b"h" * 64, storage.nbytes(), start, COUNTER, 3, b"e" * 64, False)

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    return tensor


def test_what_torch_did_not_allocate_is_refused_and_the_raw_wrapper_named(double: FakeDriver) -> None:
    with bound(0) as drv:
        address = drv.mem_alloc(512)
    with pytest.raises(UnsupportedMemoryError, match="use RawCudaIPCWrapper"):
        CudaIPCWrapper(tensor_from_pointer(address, 512, device=0, owner=None))


def test_other_memory_is_refused_by_the_name_of_its_allocator(double: FakeDriver) -> None:
    pool = VmmPool(2 << 20)
    with pytest.raises(UnsupportedMemoryError, match="VmmCudaIPCWrapper"):
        CudaIPCWrapper(pool.tensor())
    pool.close()
    with pytest.raises(UnsupportedMemoryError, match="HostIPCWrapper"):
        CudaIPCWrapper(torch.zeros(4))


def test_plain_fields_travel_and_any_strides(shared: torch.Tensor) -> None:
    view = shared.view(torch.bfloat16)[16:].reshape(-1, 8)[:, 2:6].t()
    with CudaIPCWrapper(view) as wrapper:
        packed = msgspec.msgpack.encode(wrapper.descriptor)
        again = msgspec.msgpack.decode(packed, type=TorchStorageDescriptor)
        assert again == wrapper.descriptor
        assert (wrapper.shape, wrapper.stride, wrapper.storage_offset) == (tuple(view.shape), (1, 8), 18)
        with CudaIPCWrapper.from_descriptor(again) as imported:
            alias = imported.to_tensor()
        assert alias.data_ptr() == view.data_ptr()
        assert torch.equal(alias, view)


def test_in_its_own_process_a_freed_allocation_is_refused(shared: torch.Tensor) -> None:
    with CudaIPCWrapper(shared) as exported:
        descriptor = exported.descriptor
    with bound(0) as drv:
        drv.mem_free(shared.data_ptr())
    with CudaIPCWrapper.from_descriptor(descriptor) as wrapper, pytest.raises(StaleHandleError):
        wrapper.to_tensor()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("handle", b"\x02e" + b"h" * 64),  # torch's expandable segments: would take fds out of a process
        ("handle", b"\x02e" + b"h" * 200),
        ("handle", b"h" * 63),
        ("counter_file", b"/../etc/passwd"),
        ("counter_file", b"torch_1"),
        ("counter_file", b"/torch_1/../2"),
        ("counter_file", b"/torch_1\x00x"),
        ("counter_offset", -1),
        ("counter_offset", 1 << 40),
        ("event_handle", b"e" * 63),
        ("event_sync", "yes"),
        ("storage_start", -8),
        ("storage_bytes", 100),
        ("storage_bytes", 1 << 62),
        ("storage_offset", 1),
        ("shape", (4097,)),
        ("stride", (2,)),
        ("device_uuid", ""),
        ("buffer_id", -1),
    ],
)
def test_a_descriptor_that_does_not_hold_together_is_refused(shared: torch.Tensor, field: str, value: object) -> None:
    with CudaIPCWrapper(shared) as wrapper:
        good = msgspec.to_builtins(wrapper.descriptor, builtin_types=(bytes,))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({**good, field: value}), type=TorchStorageDescriptor)


def test_an_event_that_must_be_waited_for_has_a_handle(shared: torch.Tensor) -> None:
    with CudaIPCWrapper(shared) as wrapper, pytest.raises(ValueError, match="event handle"):
        msgspec.structs.replace(wrapper.descriptor, event_handle=b"", event_sync=True)
