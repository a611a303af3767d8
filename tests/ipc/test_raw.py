from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from doubles.child import Child, ChildError
from doubles.fake_cuda import FakeDriver, installed
from doubles.side import digest, in_fresh_thread, pattern, unpack
from doubles.vmm_pool import VmmPool
from kvferry.cuda.device import bound, device_uuid
from kvferry.cuda.memory import tensor_from_pointer
from kvferry.errors import (
    MappingBoundsError,
    NotContiguousError,
    ShareError,
    StaleHandleError,
    UnknownDeviceError,
    UnsupportedMemoryError,
)
from kvferry.ipc.raw import RawCudaDescriptor, RawCudaIPCWrapper
from kvferry.ipc.table import process_table


@pytest.fixture
def double() -> Iterator[FakeDriver]:
    with installed((0, 1)) as driver:
        yield driver
        gc.collect()
        process_table().mappings.drain()
        assert driver.fake.open_mappings == 0


@pytest.fixture(scope="module")
def exporter() -> Iterator[Child]:
    """A process over the double with 4 MiB of cudaMalloc memory, "pool"."""
    with Child(fake=True, visible=(0, 1)) as child:
        child.call("alloc", name="pool", nbytes=4 << 20)
        yield child


def local(nbytes: int, device: int = 0, kind: str = "legacy") -> torch.Tensor:
    """Memory of this process, as flat bytes."""
    with bound(device) as drv:
        address = drv.fake.allocate(nbytes, kind)  # type: ignore[attr-defined]
    return tensor_from_pointer(address, nbytes, device=device, owner=None)


def opened(exported: dict[str, Any]) -> RawCudaIPCWrapper:
    wrapper = unpack(exported["kind"], exported["packed"])
    assert isinstance(wrapper, RawCudaIPCWrapper)
    return wrapper


def changed(wrapper: RawCudaIPCWrapper, **fields: Any) -> RawCudaIPCWrapper:
    return RawCudaIPCWrapper.from_descriptor(msgspec.structs.replace(wrapper.descriptor, **fields))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float32", "int8", "bool"])
def test_any_dtype_at_an_interior_offset(double: FakeDriver, exporter: Child, dtype: str) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=4096, dtype=dtype, shape=[3, 4, 8], seed=1)
    with opened(exported) as wrapper:
        tensor = wrapper.to_tensor()
        assert tensor.shape == (3, 4, 8)
        assert tensor.dtype is getattr(torch, dtype)
        assert digest(tensor) == exported["digest"]


def test_what_one_side_writes_the_other_reads(double: FakeDriver, exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="uint8", shape=[1000])
    with opened(exported) as wrapper:
        tensor = wrapper.to_tensor()
        tensor.copy_(pattern(1000, 77))
        again = exporter.call("wrap", name="w2", memory="pool", start=0, dtype="uint8", shape=[1000], seed=78)
        assert digest(tensor) == again["digest"]


def test_for_kernels_of_another_device(double: FakeDriver, exporter: Child) -> None:
    """Opened in that device's context: the driver lets its kernels reach nothing that another's has opened."""
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="int8", shape=[64], seed=2)
    with opened(exported) as wrapper:
        there, here = wrapper.to_tensor_for(1), wrapper.to_tensor()
        assert digest(there) == digest(here) == exported["digest"]
        assert double.fake.open_mappings == 2
        assert double.fake.kernel_reaches(1, there.data_ptr())
        assert not double.fake.kernel_reaches(1, here.data_ptr())
        del there, here
    with pytest.raises(ShareError, match="is closed"):
        wrapper.to_tensor_for(1)


def test_memory_of_a_device_that_only_its_exporter_sees(exporter: Child) -> None:
    """Engines often see one GPU each; the driver opens such a handle all the same."""
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="int8", shape=[64], seed=2)
    with installed((1,)) as blind, opened(exported) as wrapper:
        assert device_uuid(0) != wrapper.device_uuid
        with pytest.raises(UnknownDeviceError):
            wrapper.to_tensor()
        tensor = wrapper.to_tensor_for(0)
        assert digest(tensor) == exported["digest"]
        del tensor
        wrapper.close()
        process_table().mappings.drain()
        assert blind.fake.open_mappings == 0


def test_for_kernels_of_another_device_in_its_own_process(double: FakeDriver) -> None:
    with RawCudaIPCWrapper(local(4096)) as exported:
        again = changed(exported)
        with again:
            tensor = again.to_tensor_for(1)
            assert tensor.data_ptr() == exported.to_tensor().data_ptr()
            assert double.fake.kernel_reaches(1, tensor.data_ptr())
            assert double.fake.open_mappings == 0


def test_permuted_axes_are_put_in_memory_order(double: FakeDriver) -> None:
    memory = local(2 * 4 * 8 * 2).view(torch.bfloat16).reshape(2, 4, 8)
    with RawCudaIPCWrapper(memory.permute(0, 2, 1)) as wrapper:
        assert wrapper.shape == (2, 4, 8)
        assert wrapper.to_tensor().data_ptr() == memory.data_ptr()


def test_gaps_are_refused_and_never_copied(double: FakeDriver) -> None:
    with pytest.raises(NotContiguousError, match=r"\(4, 4\).*\(8, 1\)"):
        RawCudaIPCWrapper(local(32).reshape(4, 8)[:, :4])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("managed", ["managed memory", "cudaMalloc"]),
        ("pool", ["cudaMallocAsync", "RawCudaIPCWrapper"]),
        ("vmm", ["expandable_segments", "VmmCudaIPCWrapper"]),
        ("host", ["pageable host memory", "HostIPCWrapper"]),
    ],
)
def test_other_memory_is_refused_by_the_name_of_its_allocator(double: FakeDriver, kind: str, words: list[str]) -> None:
    if kind == "host":
        tensor = torch.zeros(16)
    elif kind == "vmm":
        tensor = VmmPool(2 << 20).tensor()
    else:
        tensor = local(512, kind=kind)
    with pytest.raises(UnsupportedMemoryError) as caught:
        RawCudaIPCWrapper(tensor)
    assert all(word in str(caught.value) for word in words)


def test_memory_that_was_imported_is_not_shared_on(double: FakeDriver, exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="uint8", shape=[16])
    with opened(exported) as wrapper, pytest.raises(UnsupportedMemoryError, match="another process shared"):
        RawCudaIPCWrapper(wrapper.to_tensor())


def test_fresh_threads_export_open_and_close(double: FakeDriver, exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=512, dtype="float16", shape=[64], thread=True)
    double.push_context(double.primary_context(1))  # this thread works on device 1 meanwhile
    before = double.current_context()

    def use() -> bool:
        wrapper = opened(exported)
        right = digest(wrapper.to_tensor()) == exported["digest"]
        wrapper.close()
        return right and double.current_context() == 0

    assert in_fresh_thread(use)
    with opened(exported) as wrapper:
        assert digest(wrapper.to_tensor()) == exported["digest"]
    assert double.current_context() == before


def test_in_its_own_process_a_handle_is_an_alias(double: FakeDriver) -> None:
    memory = local(4096)
    memory.copy_(pattern(4096, 5))
    with RawCudaIPCWrapper(memory[512:1024]) as exported:
        double.push_context(double.primary_context(1))
        with RawCudaIPCWrapper.from_descriptor(exported.descriptor) as wrapper:
            alias = wrapper.to_tensor()
        assert alias.data_ptr() == memory.data_ptr() + 512
    assert torch.equal(memory, pattern(4096, 5))
    assert double.fake.calls["cuIpcOpenMemHandle_v2"] == 0
    assert double.fake.calls["cuIpcCloseMemHandle"] == 0


def test_in_its_own_process_a_freed_allocation_is_refused(double: FakeDriver) -> None:
    memory = local(4096)
    with RawCudaIPCWrapper(memory) as exported:
        descriptor = exported.descriptor
    with bound(0) as drv:
        drv.mem_free(memory.data_ptr())
    wrapper = RawCudaIPCWrapper.from_descriptor(descriptor)
    with wrapper, pytest.raises(StaleHandleError, match="freed"):
        wrapper.to_tensor()


def test_one_driver_open_for_many_tensors_of_one_allocation(double: FakeDriver, exporter: Child) -> None:
    layers = [
        exporter.call("wrap", name=f"l{i}", memory="pool", start=i * 8192, dtype="bfloat16", shape=[4096], seed=i)
        for i in range(80)
    ]
    wrappers = [opened(layer) for layer in layers]
    tensors = [wrapper.to_tensor() for wrapper in wrappers]
    assert [digest(tensor) for tensor in tensors] == [layer["digest"] for layer in layers]
    assert double.fake.calls["cuIpcOpenMemHandle_v2"] == 1
    for wrapper in wrappers:
        wrapper.close()
    assert double.fake.open_mappings == 1  # the tensors live
    tensors.clear()
    process_table().mappings.drain()
    assert double.fake.calls["cuIpcCloseMemHandle"] == 1


def test_open_twice_close_once_read_through_the_second(double: FakeDriver, exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="int32", shape=[256], seed=9)
    first, second = opened(exported), opened(exported)
    assert first == second
    first.to_tensor()
    tensor = second.to_tensor()
    first.close()
    first.close()
    process_table().mappings.drain()
    assert digest(tensor) == exported["digest"]
    assert digest(second.to_tensor()) == exported["digest"]
    second.close()
    process_table().mappings.drain()
    assert digest(tensor) == exported["digest"]  # its own use of the mapping outlives the wrapper's
    with pytest.raises(ShareError, match="closed"):
        second.to_tensor()


def test_four_threads_open_read_and_close(double: FakeDriver, exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=256, dtype="uint8", shape=[4], seed=3)
    expected = pattern(4, 3).tolist()
    wrong: list[object] = []

    def work() -> None:
        for _ in range(250):
            with opened(exported) as wrapper:
                if wrapper.to_tensor().tolist() != expected:
                    wrong.append("bytes")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_a_mapping_outlives_a_killed_exporter_until_it_is_closed(double: FakeDriver) -> None:
    with Child(fake=True) as child:
        child.call("alloc", name="pool", nbytes=1 << 20)
        exported = child.call("wrap", name="w", memory="pool", start=64, dtype="uint8", shape=[1000], seed=4)
        wrapper = opened(exported)
        tensor = wrapper.to_tensor()
        child.kill()
        assert digest(tensor) == exported["digest"]
        begun = time.monotonic()
        wrapper.close()
        del tensor
        process_table().mappings.drain()
        assert double.fake.open_mappings == 0
        assert time.monotonic() - begun < 0.5
        late = opened(exported)
        with late, pytest.raises(ShareError, match=r"pid namespace.*GPU-"):
            late.to_tensor()


def test_uuids_not_ordinals_tell_the_device(exporter: Child) -> None:
    exporter.call("alloc", name="second", nbytes=4096, device=1)
    exported = exporter.call("wrap", name="w", memory="second", start=0, dtype="uint8", shape=[64])
    with installed((1, 0)) as double, opened(exported) as wrapper:
        tensor = wrapper.to_tensor()
        assert digest(tensor) == exported["digest"]
        assert double.fake.allocations[tensor.data_ptr()].device == 0
        del tensor
        wrapper.close()
        process_table().mappings.drain()
    with installed((0,)):
        uuid = device_uuid(0)
        with opened(exported) as hidden, pytest.raises(UnknownDeviceError, match=uuid):
            hidden.to_tensor()


def test_a_remade_allocation_never_meets_the_old_mapping(double: FakeDriver, exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="uint8", shape=[64])
    old = opened(exported)
    tensor = old.to_tensor()
    remade = changed(old, buffer_id=old.descriptor.buffer_id + 1)  # type: ignore[attr-defined]
    with remade, pytest.raises(StaleHandleError):
        remade.to_tensor()
    del tensor
    old.close()
    again = changed(old, buffer_id=old.descriptor.buffer_id + 1)  # type: ignore[attr-defined]
    with again:
        again.to_tensor()
    assert double.fake.calls["cuIpcCloseMemHandle"] == 1


def test_a_smaller_allocation_than_was_spoken_of_is_stale(double: FakeDriver, exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="uint8", shape=[64])
    wrapper = changed(opened(exported), alloc_size=1 << 40)
    with wrapper, pytest.raises(StaleHandleError, match="4194304"):
        wrapper.to_tensor()
    assert double.fake.open_mappings == 0


def test_bytes_beyond_what_is_mapped_make_no_tensor(double: FakeDriver, exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="uint8", shape=[64])
    first = opened(exported)
    first.to_tensor()
    beyond = changed(first, alloc_size=1 << 40, offset=4 << 20)  # the mapping is there already
    with beyond, pytest.raises(MappingBoundsError, match="4194304"):
        beyond.to_tensor()
    first.close()


def test_a_handle_that_others_opened_in_this_process_is_refused_by_name(double: FakeDriver, exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="uint8", shape=[64])
    wrapper = opened(exported)
    with bound(0) as drv:
        address = drv.ipc_open_mem_handle(wrapper.descriptor.handle)  # type: ignore[attr-defined]
        with pytest.raises(ShareError, match="torch's own IPC"):
            wrapper.to_tensor()
        drv.ipc_close_mem_handle(address)
    wrapper.close()


def test_a_failing_driver_leaves_nothing_mapped(double: FakeDriver, exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="uint8", shape=[64])
    double.fake.failures["cuMemGetAddressRange_v2"] = [500]
    with opened(exported) as wrapper:
        with pytest.raises(Exception, match="cuMemGetAddressRange"):
            wrapper.to_tensor()
        assert double.fake.open_mappings == 0
        assert process_table().mappings.stats().mapped == 0
        wrapper.to_tensor()


def test_a_forked_importer_has_its_own_token_and_no_cuda(exporter: Child) -> None:
    exported = exporter.call("wrap", name="w", memory="pool", start=0, dtype="uint8", shape=[64])
    with Child(fake=True, visible=(0, 1)) as importer:
        importer.call("open", name="w", kind=exported["kind"], packed=exported["packed"])
        seen = importer.call("fork")
        assert seen["token"] != importer.call("token")["token"]
        assert seen["mapped"] == 0
        assert seen["kind"] == "CudaUnavailableError"
        assert importer.call("read", name="w")["digest"] == exported["digest"]
        importer.call("close", name="w")
        assert importer.call("stats")["mapped"] == 0


def test_an_unknown_operation_of_the_child_is_an_error(exporter: Child) -> None:
    with pytest.raises(ChildError) as caught:
        exporter.call("wrap", name="w", memory="absent", start=0, dtype="uint8", shape=[1])
    assert caught.value.kind == "KeyError"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("handle", b"short"),
        ("alloc_size", 10),
        ("alloc_size", -1),
        ("alloc_size", 1 << 62),
        ("offset", -8),
        ("offset", 4096),
        ("nbytes", 1 << 40),
        ("nbytes", 0),
        ("shape", (0,)),
        ("stride", (2,)),
        ("device_uuid", ""),
        ("buffer_id", -1),
    ],
)
def test_a_descriptor_that_does_not_hold_together_is_refused(double: FakeDriver, field: str, value: object) -> None:
    with RawCudaIPCWrapper(local(4096)[:512]) as wrapper:
        good = wrapper.descriptor
    packed = msgspec.msgpack.encode({**msgspec.to_builtins(good, builtin_types=(bytes,)), field: value})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(packed, type=RawCudaDescriptor)
