"""HostIPCWrapper: export, checks of the file before it is mapped, mapping, unsealed files, lifetimes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings

import msgspec
import pytest
import torch

from doubles.host_files import count_mappings, describe, foreign_file, import_file
from kvferry.errors import NotContiguousError, ShareError, UnsupportedMemoryError
from kvferry.ipc.host import HostDescriptor, HostIPCWrapper
from kvferry.ipc.shared_memory import Segment, allocate_shared
from kvferry.ipc.table import process_table
from kvferry.ipc.wire import decode, encode


def test_the_exporter_describes_an_interior_view() -> None:
    tensor = allocate_shared((4, 6), torch.bfloat16)
    with HostIPCWrapper(tensor[1]) as wrapper:
        assert wrapper.dtype == torch.bfloat16
        assert (wrapper.shape, wrapper.stride, wrapper.storage_offset) == ((6,), (1,), 6)
        assert wrapper.device_uuid == ""
        assert wrapper.num_fds == 1
        assert wrapper.descriptor.exporter == process_table().token
        assert isinstance(wrapper.descriptor, HostDescriptor)
        assert (wrapper.descriptor.offset, wrapper.descriptor.nbytes) == (12, 12)
        assert wrapper.to_tensor().data_ptr() == tensor[1].data_ptr()


def test_axes_in_another_order_are_permuted_and_gaps_are_refused() -> None:
    tensor = allocate_shared((4, 6, 2))
    with HostIPCWrapper(tensor.permute(2, 0, 1)) as wrapper:
        assert wrapper.shape == (4, 6, 2)
        assert wrapper.to_tensor().is_contiguous()
    with pytest.raises(NotContiguousError, match=r"\(4, 3, 2\)"):
        HostIPCWrapper(tensor[:, :3])


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(4), "rehome"),
        (torch.zeros(4, device="meta"), "no bytes"),
        (torch.zeros(0), "no bytes"),
        (torch.eye(3).to_sparse(), "strided"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "conjugated"),
    ],
    ids=["ordinary", "meta", "empty", "sparse", "conjugated"],
)
def test_what_cannot_be_shared_is_refused_with_what_to_do(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(UnsupportedMemoryError, match=text):
        HostIPCWrapper(tensor)


def test_decoding_in_the_exporting_process_gives_an_alias() -> None:
    tensor = allocate_shared((8,), torch.int64)
    inode = _inode(tensor)
    with HostIPCWrapper(tensor[2:5]) as exported:
        [imported] = decode(*encode([exported]))
        assert imported == exported
        assert hash(imported) == hash(exported)
        alias = imported.to_tensor()
        imported.close()
        alias.fill_(5)
        assert tensor.tolist() == [0, 0, 5, 5, 5, 0, 0, 0]
        assert alias.data_ptr() == tensor[2:5].data_ptr()
        assert count_mappings(inode) == 1
    address = tensor.data_ptr()
    del tensor, exported, imported
    gc.collect()
    assert alias.tolist() == [5, 5, 5]  # the alias alone keeps the segment
    assert alias.data_ptr() == address + 16


def _inode(tensor: torch.Tensor) -> int:
    with HostIPCWrapper(tensor) as wrapper:
        assert isinstance(wrapper.descriptor, HostDescriptor)
        return wrapper.descriptor.inode


def test_equality_needs_the_very_same_class() -> None:
    class Sibling(HostIPCWrapper):
        pass

    tensor = allocate_shared((4,))
    with HostIPCWrapper(tensor) as one, HostIPCWrapper(tensor) as two, Sibling(tensor) as sibling:
        assert one == two
        assert one != sibling
        assert sibling != one
        assert one != "a wrapper"


def test_many_tensors_of_one_file_are_one_mapping_that_outlives_wrappers_but_not_tensors() -> None:
    table = process_table().mappings
    table.drain()
    opens = table.stats().opens
    with foreign_file(8192) as fd:
        inode = os.fstat(fd).st_ino
        wrappers = [import_file(fd, shape=(4,), offset=at, nbytes=4) for at in range(0, 400, 4)]
        tensors = [wrapper.to_tensor() for wrapper in wrappers]
        assert count_mappings(inode) == 1
        assert table.stats().opens == opens + 1
        for wrapper in wrappers:
            wrapper.close()
            wrapper.close()
        table.drain()
        assert count_mappings(inode) == 1
        last = tensors[-1][1:3]
        del tensors
        gc.collect()
        table.drain()
        assert last.tolist() == [7, 7]
        del last
        gc.collect()
        table.drain()
        assert count_mappings(inode) == 0


def test_writes_reach_the_file() -> None:
    with (
        foreign_file(4096) as fd,
        import_file(fd, dtype="bfloat16", shape=(2, 4), stride=(4, 1), offset=16, nbytes=16) as w,
    ):
        w.to_tensor().fill_(1.0)
        assert os.pread(fd, 34, 15) == b"\x07" + b"\x80\x3f" * 8 + b"\x07" * 17


def test_an_odd_offset_works_for_any_dtype() -> None:
    with foreign_file(4096) as fd, import_file(fd, dtype="float64", shape=(2,), offset=8, nbytes=16) as wrapper:
        assert wrapper.to_tensor().shape == (2,)


def test_to_tensor_before_the_descriptor_or_after_close_is_refused() -> None:
    with foreign_file(4096) as fd:
        wrapper = HostIPCWrapper.from_descriptor(describe(fd))
        with pytest.raises(ShareError, match="has not come"):
            wrapper.to_tensor()
        wrapper.close()
        with pytest.raises(ShareError, match="closed"):
            wrapper.to_tensor()
    with HostIPCWrapper(allocate_shared((4,))) as exported:
        pass
    with pytest.raises(ShareError, match="closed"):
        exported.to_tensor()
    with pytest.raises(ShareError):
        exported.export_fd(0)


def test_a_closed_segment_is_not_exported() -> None:
    segment = Segment(4096)
    tensor = segment.tensor()
    with HostIPCWrapper(tensor) as wrapper:
        segment.close()
        with pytest.raises(ShareError, match="closed"):
            wrapper.export_fd(0)
    with pytest.raises(ShareError, match="closed"):
        HostIPCWrapper(tensor)


def test_an_importer_that_is_not_closed_is_warned_about_and_gives_its_mapping_back() -> None:
    table = process_table().mappings
    with foreign_file(4096) as fd:
        inode = os.fstat(fd).st_ino
        wrapper = import_file(fd)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del wrapper
            gc.collect()
        assert [w.category for w in caught] == [ResourceWarning]
        table.drain()
        assert count_mappings(inode) == 0


def test_threads_open_read_and_close_the_same_file() -> None:
    failures: list[str] = []

    def work() -> None:
        for _ in range(300):
            with import_file(fd, shape=(4,), offset=8, nbytes=4) as wrapper:
                tensor = wrapper.to_tensor()
            if tensor.tolist() != [7, 7, 7, 7]:
                failures.append(str(tensor))

    with foreign_file(4096) as fd:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        gc.collect()
        process_table().mappings.drain()
        assert not failures
        assert count_mappings(os.fstat(fd).st_ino) == 0


def test_a_forked_child_exports_inherited_memory_under_its_own_token() -> None:
    # In a process of its own: forking the test process, which has threads, would be unsafe.
    code = (
        "import os, torch\n"
        "from kvferry import ipc\n"
        "t = ipc.allocate_shared((4,), torch.int32); t.fill_(3)\n"
        "w = ipc.HostIPCWrapper(t)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    mine = ipc.HostIPCWrapper(t)\n"
        "    ok = mine.descriptor.exporter != w.descriptor.exporter\n"
        "    [i] = ipc.decode(*ipc.encode([w])); j = i.to_tensor(); i.close()\n"
        "    j.add_(1)\n"
        "    os._exit(0 if ok and t.tolist() == [4] * 4 else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert t.tolist() == [4] * 4\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_descriptors_survive_msgspec_and_are_immutable() -> None:
    with foreign_file(4096) as fd:
        descriptor = describe(fd)
    with pytest.raises(AttributeError):
        descriptor.offset = 5  # type: ignore[misc]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(descriptor), type=HostDescriptor) == descriptor
