from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from doubles.child import Child
from doubles.fake_cuda import FakeDriver, installed
from doubles.side import digest, pattern, receive_wrapper_fds, unpack
from doubles.vmm_pool import VmmPool
from kvferry.cuda.device import bound
from kvferry.cuda.memory import HandleType, tensor_from_pointer
from kvferry.errors import CudaError, MappingBoundsError, NotContiguousError, ShareError, UnsupportedMemoryError
from kvferry.ipc.table import process_table
from kvferry.ipc.vmm import VmmCudaDescriptor, VmmCudaIPCWrapper

MIB = 1 << 20


@pytest.fixture
def double() -> Iterator[FakeDriver]:
    """The double; afterwards nothing of this process may be held, mapped or open any more."""
    with installed() as driver:
        fds = len(os.listdir("/proc/self/fd"))
        yield driver
        gc.collect()
        process_table().mappings.drain()
        assert not driver.fake.handles
        if driver.fake.calls["cuMemCreate"] == 0:  # else the test's own pool is still there
            assert not driver.fake.reservations
            assert len(os.listdir("/proc/self/fd")) == fds


@pytest.fixture(scope="module")
def exporter() -> Iterator[Child]:
    """A process over the double with 64 MiB of virtual memory in chunks of 20 MiB, "pool"."""
    with Child(fake=True) as child:
        child.call("alloc", name="pool", nbytes=60 * MIB, kind="vmm", chunk=20 * MIB)
        yield child


def exported_by(child: Child, start: int, nbytes: int, dtype: str = "uint8") -> dict[str, Any]:
    shape = [nbytes // getattr(torch, dtype).itemsize]
    return child.call("wrap", name="w", memory="pool", start=start, dtype=dtype, shape=shape, wrapper="vmm", seed=2)


def received(child: Child, exported: dict[str, Any]) -> VmmCudaIPCWrapper:
    """The importing wrapper with its file descriptors."""
    wrapper = unpack("vmm", exported["packed"])
    assert isinstance(wrapper, VmmCudaIPCWrapper)
    child.ask("send_fds", name="w")
    receive_wrapper_fds(child.sock, wrapper)
    child.answer()
    return wrapper


@pytest.mark.parametrize(
    ("start", "nbytes", "chunks"),
    [
        (0, 60 * MIB, 3),
        (20 * MIB - 512, 1024, 2),
        (20 * MIB, 20 * MIB, 1),
        (30 * MIB, 512, 1),
        (512, 20 * MIB, 2),
    ],
)
def test_all_chunks_of_a_tensor_are_mapped_side_by_side(
    double: FakeDriver, exporter: Child, start: int, nbytes: int, chunks: int
) -> None:
    exported = exported_by(exporter, start, nbytes, "bfloat16")
    assert exported["fds"] == chunks
    with received(exporter, exported) as wrapper:
        tensor = wrapper.to_tensor()
        assert tensor.dtype is torch.bfloat16
        assert digest(tensor) == exported["digest"]
        assert list(double.fake.reservations.values()) == [chunks * 20 * MIB]
        assert not double.fake.handles  # let go of once mapped
        assert digest(wrapper.to_tensor()) == exported["digest"]
        assert double.fake.calls["cuMemAddressReserve"] == 1
        del tensor


def test_the_mapping_lives_as_long_as_a_tensor(double: FakeDriver, exporter: Child) -> None:
    exported = exported_by(exporter, 0, 40 * MIB)
    wrapper = received(exporter, exported)
    tensor = wrapper.to_tensor()
    wrapper.close()
    process_table().mappings.drain()
    assert digest(tensor) == exported["digest"]
    del tensor
    process_table().mappings.drain()
    assert not double.fake.chunks


def test_a_mapping_outlives_a_killed_exporter(double: FakeDriver) -> None:
    with Child(fake=True) as child:
        child.call("alloc", name="pool", nbytes=4 * MIB, kind="vmm")
        exported = exported_by(child, MIB, 2 * MIB)
        with received(child, exported) as wrapper:
            tensor = wrapper.to_tensor()
            child.kill()
            assert digest(tensor) == exported["digest"]
            del tensor


def test_2000_imports_of_2_mib(double: FakeDriver) -> None:
    """What is reserved is the allocation and no more, so address space does not run out."""
    with VmmPoolExport(2 * MIB) as export:
        wrappers = [export.importer() for _ in range(2000)]
        tensors = [wrapper.to_tensor() for wrapper in wrappers]
        assert sum(double.fake.reservations.values()) == 2000 * 2 * MIB + export.reserved
        assert tensors[-1][:8].tolist() == tensors[0][:8].tolist() == pattern(8, 6).tolist()
        tensors.clear()
        for wrapper in wrappers:
            wrapper.close()
        process_table().mappings.drain(timeout_s=30)
        assert len(double.fake.reservations) == 1


class VmmPoolExport:
    """An export of this process, imported here as if by another: every importer sees a foreign token."""

    def __init__(self, nbytes: int) -> None:
        self.pool = VmmPool(nbytes)
        tensor = self.pool.tensor()
        tensor[:64].copy_(pattern(64, 6))
        self.wrapper = VmmCudaIPCWrapper(tensor)
        self.reserved = 2 * self.pool.nbytes

    def importer(self, **changes: Any) -> VmmCudaIPCWrapper:
        fields = {"exporter": os.urandom(16), "export_id": os.urandom(16), **changes}
        wrapper = VmmCudaIPCWrapper.from_descriptor(msgspec.structs.replace(self.wrapper.descriptor, **fields))
        for index in range(self.wrapper.num_fds):
            wrapper.import_fd(index, self.wrapper.export_fd(index))
        return wrapper

    def __enter__(self) -> VmmPoolExport:
        return self

    def __exit__(self, *error: object) -> None:
        self.wrapper.close()
        self.pool.close()


@pytest.mark.parametrize(
    ("failing", "successes"), [("cuMemAddressReserve", 0), ("cuMemMap", 0), ("cuMemMap", 2), ("cuMemSetAccess", 0)]
)
def test_a_failure_at_any_step_undoes_all_steps(double: FakeDriver, failing: str, successes: int) -> None:
    with VmmPoolExport(6 * MIB) as export:
        wrapper = export.importer()
        before = (len(double.fake.reservations), len(double.fake.chunks))
        double.fake.failures[failing] = [*([0] * successes), 2]
        with pytest.raises(CudaError, match=failing):
            wrapper.to_tensor()
        assert (len(double.fake.reservations), len(double.fake.chunks)) == before
        assert not double.fake.handles
        double.fake.failures.clear()
        with pytest.raises(ShareError, match="have not come"):
            wrapper.to_tensor()
        wrapper.close()


def test_missing_descriptors_are_counted_and_may_still_come(double: FakeDriver) -> None:
    with VmmPoolExport(6 * MIB) as export:
        wrapper = VmmCudaIPCWrapper.from_descriptor(
            msgspec.structs.replace(export.wrapper.descriptor, exporter=os.urandom(16))
        )
        wrapper.import_fd(0, export.wrapper.export_fd(0))
        with pytest.raises(ShareError, match=r"2 of the 3 file descriptors.*number 1"):
            wrapper.to_tensor()
        for index in (2, 1):
            wrapper.import_fd(index, export.wrapper.export_fd(index))
        wrapper.import_fd(1, export.wrapper.export_fd(1))  # again: the first is let go of
        assert wrapper.to_tensor()[:8].tolist() == pattern(8, 6).tolist()
        wrapper.close()


def test_a_foreign_file_descriptor_is_refused_and_closed(double: FakeDriver) -> None:
    with VmmPoolExport(2 * MIB) as export:
        wrapper = VmmCudaIPCWrapper.from_descriptor(
            msgspec.structs.replace(export.wrapper.descriptor, exporter=os.urandom(16))
        )
        fd = os.open("/dev/null", os.O_RDONLY)
        with pytest.raises(ShareError, match="chunk 0"):
            wrapper.import_fd(0, fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        with pytest.raises(IndexError):
            wrapper.import_fd(5, os.open("/dev/null", os.O_RDONLY))
        wrapper.close()


def test_imported_chunks_are_let_go_of_by_close(double: FakeDriver) -> None:
    with VmmPoolExport(4 * MIB) as export:
        wrapper = export.importer()
        assert len(double.fake.handles) == 2
        wrapper.close()
        assert not double.fake.handles


def test_sizes_that_the_chunks_do_not_have_are_refused(double: FakeDriver) -> None:
    with VmmPoolExport(4 * MIB) as export:
        larger = export.importer(chunks=(4 * MIB, 4 * MIB))
        with larger, pytest.raises(CudaError, match="cuMemMap"):
            larger.to_tensor()
        odd = export.importer(chunks=(2 * MIB + 512, 2 * MIB))
        with odd, pytest.raises(MappingBoundsError, match="2097152"):
            odd.to_tensor()


def test_memory_with_no_handle_type_is_refused_with_the_reason(double: FakeDriver) -> None:
    pool = VmmPool(2 * MIB, types=HandleType.NONE)
    with pytest.raises(UnsupportedMemoryError, match="requestedHandleTypes"):
        VmmCudaIPCWrapper(pool.tensor())
    pool.close()


def test_fabric_handles_need_no_file_descriptor(double: FakeDriver) -> None:
    double.fake.fabric_permitted = True
    pool = VmmPool(4 * MIB, types=HandleType.FABRIC)
    with VmmCudaIPCWrapper(pool.tensor()) as exported:
        descriptor = exported.descriptor
        assert isinstance(descriptor, VmmCudaDescriptor)
        assert exported.num_fds == 0
        assert [len(handle) for handle in descriptor.fabric] == [64, 64]
        foreign = VmmCudaIPCWrapper.from_descriptor(msgspec.structs.replace(descriptor, exporter=os.urandom(16)))
        with foreign, pytest.raises(ShareError, match="IMEX"):
            foreign.to_tensor()  # the double refuses a handle of its own process
    pool.close()


def test_other_memory_is_refused_by_the_name_of_its_allocator(double: FakeDriver) -> None:
    with bound(0) as drv:
        address = drv.mem_alloc(512)
    with pytest.raises(UnsupportedMemoryError, match=r"cudaMalloc.*RawCudaIPCWrapper"):
        VmmCudaIPCWrapper(tensor_from_pointer(address, 512, device=0, owner=None))
    with pytest.raises(UnsupportedMemoryError, match="HostIPCWrapper"):
        VmmCudaIPCWrapper(torch.zeros(4))
    pool = VmmPool(2 * MIB)
    with pytest.raises(NotContiguousError):
        VmmCudaIPCWrapper(pool.tensor()[:64].reshape(8, 8)[:, :4])
    pool.close()


def test_in_its_own_process_it_is_an_alias(double: FakeDriver) -> None:
    with VmmPoolExport(4 * MIB) as export:
        wrapper = VmmCudaIPCWrapper.from_descriptor(export.wrapper.descriptor)
        for index in range(2):
            wrapper.import_fd(index, export.wrapper.export_fd(index))
        assert wrapper.to_tensor().data_ptr() == export.pool.base
        assert double.fake.calls["cuMemImportFromShareableHandle"] == 0
        wrapper.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunks", ()),
        ("chunks", (0, 8 * MIB)),
        ("chunks", (MIB,)),
        ("chunks", (1 << 62,)),
        ("chunks", (2 * MIB,) * 65_537),
        ("fabric", (b"x" * 64,)),
        ("fabric", (b"x" * 64, b"short")),
        ("export_id", b"short"),
        ("offset", -512),
        ("offset", 4 * MIB),
    ],
)
def test_a_descriptor_that_does_not_hold_together_is_refused(double: FakeDriver, field: str, value: object) -> None:
    with VmmPoolExport(4 * MIB) as export:
        good = msgspec.to_builtins(export.wrapper.descriptor, builtin_types=(bytes,))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({**good, field: value}), type=VmmCudaDescriptor)
