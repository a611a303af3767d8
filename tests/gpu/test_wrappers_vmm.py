"""CUDA virtual memory between real processes: expandable segments, many imports."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest

from doubles.child import Child, ChildError
from doubles.importing import check_nothing_mapped, received
from doubles.side import digest, pattern
from doubles.vmm_pool import VmmPool
from kvferry.cuda.memory import MemoryKind, pointer_info
from kvferry.cuda.stream import synchronize_device
from kvferry.ipc.table import process_table
from kvferry.ipc.vmm import VmmCudaIPCWrapper

pytestmark = pytest.mark.gpu

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(autouse=True)
def nothing_stays_mapped() -> Iterator[None]:
    yield
    check_nothing_mapped()


def test_expandable_segments_are_shared_chunk_by_chunk() -> None:
    with Child(fake=False, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) as child:
        child.call("alloc", name="kv", nbytes=64 * MIB, kind="torch")
        with pytest.raises(ChildError, match="VmmCudaIPCWrapper"):
            child.call("wrap", name="w", memory="kv", start=0, dtype="uint8", shape=[64])
        exported = child.call(
            "wrap", name="w", memory="kv", start=4096, dtype="bfloat16", shape=[31, MIB], seed=7, wrapper="vmm"
        )
        assert exported["fds"] >= 2

        def share_once() -> tuple[int, int]:
            """One import from start to end; returns how many files are open here and there afterwards."""
            wrapper = received(child, "w", exported)
            tensor = wrapper.to_tensor()
            assert pointer_info(tensor.data_ptr()).kind is MemoryKind.VMM
            assert digest(tensor) == exported["digest"]
            del tensor
            wrapper.close()
            process_table().mappings.drain()
            return len(os.listdir("/proc/self/fd")), int(child.call("stats")["open_fds"])

        assert share_once() == share_once()
        wrapper = received(child, "w", exported)
        tensor = wrapper.to_tensor()
        child.kill()
        assert digest(tensor) == exported["digest"]
        del tensor
        wrapper.close()


def test_2000_imports_of_2_mib() -> None:
    pool = VmmPool(2 * MIB)
    pool.tensor()[:64].copy_(pattern(64, 6))
    synchronize_device(0)
    exported = VmmCudaIPCWrapper(pool.tensor())
    fds = len(os.listdir("/proc/self/fd"))
    wrappers: list[VmmCudaIPCWrapper] = []
    for _ in range(2000):
        foreign = {"exporter": os.urandom(16), "export_id": os.urandom(16)}  # as if another process had made it
        wrapper = VmmCudaIPCWrapper.from_descriptor(msgspec.structs.replace(exported.descriptor, **foreign))
        wrapper.import_fd(0, exported.export_fd(0))
        wrapper.to_tensor()
        wrappers.append(wrapper)
    assert wrappers[1999].to_tensor()[:64].cpu().tolist() == pattern(64, 6).tolist()
    for wrapper in wrappers:
        wrapper.close()
    process_table().mappings.drain(timeout_s=30)
    assert len(os.listdir("/proc/self/fd")) <= fds
    exported.close()
    pool.close()
