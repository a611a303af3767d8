"""HostIPCWrapper: export, checks of the file before it is mapped, mapping, unsealed files, lifetimes."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from kvferry.errors import MappingBoundsError, NotContiguousError, ShareError, UnsupportedMemoryError
from kvferry.ipc.host import HostDescriptor, HostIPCWrapper
from kvferry.ipc.shared_memory import F_ADD_SEALS, F_SEAL_SHRINK, FileIdentity, Segment, allocate_shared
from kvferry.ipc.table import process_table
from kvferry.ipc.wire import decode, encode

_PEER = b"p" * 16


def _count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _count_mappings(inode: int) -> int:
    with open("/proc/self/maps", encoding="ascii") as maps:
        return sum(line.split()[4] == str(inode) for line in maps)


@contextlib.contextmanager
def _foreign_file(nbytes: int, seals: int = F_SEAL_SHRINK, fill: int = 7) -> Iterator[int]:
    """A memfd that this process did not make as a segment, as from a peer."""
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, bytes([fill]) * nbytes, 0)
        if seals:
            fcntl.fcntl(fd, F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def _descriptor(fd: int, **changes: Any) -> HostDescriptor:
    """A descriptor of all bytes of `fd`, as uint8, unless changed."""
    identity, size = FileIdentity.of(fd), os.fstat(fd).st_size
    fields: dict[str, Any] = {
        "dtype": "uint8",
        "shape": (size,),
        "stride": (1,),
        "storage_offset": 0,
        "device_uuid": "",
        "exporter": _PEER,
        "file_size": size,
        "offset": 0,
        "nbytes": size,
        "file_device": identity.device,
        "inode": identity.inode,
    }
    return HostDescriptor(**{**fields, **changes})


def _import(fd: int, **changes: Any) -> HostIPCWrapper:
    wrapper = HostIPCWrapper.from_descriptor(_descriptor(fd, **changes))
    wrapper.import_fd(0, os.dup(fd))
    return wrapper


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
        assert _count_mappings(inode) == 1
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
    with _foreign_file(8192) as fd:
        inode = os.fstat(fd).st_ino
        wrappers = [_import(fd, shape=(4,), offset=at, nbytes=4) for at in range(0, 400, 4)]
        tensors = [wrapper.to_tensor() for wrapper in wrappers]
        assert _count_mappings(inode) == 1
        assert table.stats().opens == opens + 1
        for wrapper in wrappers:
            wrapper.close()
            wrapper.close()
        table.drain()
        assert _count_mappings(inode) == 1
        last = tensors[-1][1:3]
        del tensors
        gc.collect()
        table.drain()
        assert last.tolist() == [7, 7]
        del last
        gc.collect()
        table.drain()
        assert _count_mappings(inode) == 0


def test_writes_reach_the_file() -> None:
    with (
        _foreign_file(4096) as fd,
        _import(fd, dtype="bfloat16", shape=(2, 4), stride=(4, 1), offset=16, nbytes=16) as w,
    ):
        w.to_tensor().fill_(1.0)
        assert os.pread(fd, 34, 15) == b"\x07" + b"\x80\x3f" * 8 + b"\x07" * 17


def test_an_odd_offset_works_for_any_dtype() -> None:
    with _foreign_file(4096) as fd, _import(fd, dtype="float64", shape=(2,), offset=8, nbytes=16) as wrapper:
        assert wrapper.to_tensor().shape == (2,)


@pytest.mark.parametrize("seals", [0, 4], ids=["none", "grow only"])
def test_an_unsealed_file_is_never_mapped_but_read_and_written_within_bounds(seals: int) -> None:
    before = _count_fds()
    with _foreign_file(8192, seals) as fd:
        with _import(fd, shape=(100,), offset=4000, nbytes=100) as wrapper:
            with pytest.raises(ShareError, match="read_into"):
                wrapper.to_tensor()
            assert _count_mappings(os.fstat(fd).st_ino) == 0
            wrapper.write_from(b"\x01\x02", 98)
            buffer = bytearray(4)
            wrapper.read_into(buffer, 96)
            assert buffer == b"\x07\x07\x01\x02"
            for offset in (97, -1):
                with pytest.raises(MappingBoundsError):
                    wrapper.read_into(buffer, offset)
                with pytest.raises(MappingBoundsError):
                    wrapper.write_from(buffer, offset)
            os.ftruncate(fd, 4050)
            with pytest.raises(ShareError, match="cut"):
                wrapper.read_into(bytearray(100))
        with pytest.raises(ShareError, match="no unsealed file"):
            wrapper.read_into(buffer)
    assert _count_fds() == before


def test_large_reads_go_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = os.preadv

    def spy(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(len(buffers[0]))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    nbytes = (8 << 20) + 5
    with _foreign_file(nbytes, 0) as fd, _import(fd) as wrapper:
        buffer = bytearray(nbytes)
        wrapper.read_into(buffer)
    assert sizes == [8 << 20, 5]
    assert buffer.count(7) == nbytes


def test_a_sealed_file_is_not_read_through_calls() -> None:
    with _foreign_file(4096) as fd, _import(fd) as wrapper, pytest.raises(ShareError, match="to_tensor"):
        wrapper.read_into(bytearray(1))


def _regular_file() -> int:
    return os.open(os.path.dirname(__file__), os.O_RDWR | os.O_TMPFILE)


def _socket() -> int:
    one, two = socket.socketpair()
    two.close()
    return one.detach()


@pytest.mark.parametrize(
    "make",
    [lambda: os.open("/dev/null", os.O_RDWR), lambda: os.open("/", os.O_RDONLY), _socket, _regular_file],
    ids=["device", "directory", "socket", "disk file"],
)
def test_a_descriptor_that_is_no_memory_file_is_refused_and_closed(make: Any) -> None:
    before = _count_fds()
    with _foreign_file(4096) as fd, HostIPCWrapper.from_descriptor(_descriptor(fd)) as wrapper:
        other = make()
        with pytest.raises(ShareError, match="file descriptor that came"):
            wrapper.import_fd(0, other)
    assert _count_fds() == before


def test_a_shorter_or_other_file_than_described_is_refused() -> None:
    before = _count_fds()
    with _foreign_file(4096) as fd, _foreign_file(4096) as other:
        for changes in ({"file_size": 8192}, {"inode": FileIdentity.of(other).inode}, {"file_device": 1 << 40}):
            with pytest.raises(ShareError, match="another file"):
                _import(fd, **changes)
    assert _count_fds() == before


def test_a_file_that_may_not_be_written_is_refused() -> None:
    with _foreign_file(4096) as fd:
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        wrapper = HostIPCWrapper.from_descriptor(_descriptor(fd))
        with wrapper, pytest.raises(ShareError, match="mmap"):
            wrapper.import_fd(0, read_only)
    process_table().mappings.drain()


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 4000, "nbytes": 100, "shape": (100,)},
        {"offset": -1},
        {"nbytes": 4095},
        {"shape": (2, 4), "stride": (8, 1), "nbytes": 8},
        {"shape": (0,), "nbytes": 0},
        {"device_uuid": "GPU-0"},
        {"inode": -1},
        {"dtype": "float31"},
        {"exporter": b"short"},
        {"shape": (1,) * 17, "stride": (1,) * 17, "nbytes": 1},
        {"shape": (4096, 1 << 60), "stride": (1 << 60, 1)},
        {"shape": (4096,), "stride": (1, 1)},
        {"storage_offset": 1 << 62},
        {"storage_offset": -1},
    ],
)
def test_a_descriptor_that_does_not_hold_together_cannot_be_made(changes: dict[str, Any]) -> None:
    with _foreign_file(4096) as fd, pytest.raises(ValueError):
        _descriptor(fd, **changes)


def test_file_descriptors_in_wrong_places_are_refused_and_closed() -> None:
    before = _count_fds()
    with _foreign_file(4096) as fd:
        with _import(fd) as wrapper:
            for index in (0, 1, -1):
                with pytest.raises((ShareError, IndexError)):
                    wrapper.import_fd(index, os.dup(fd))
            with pytest.raises(IndexError):
                wrapper.export_fd(0)
        with pytest.raises(ShareError):
            wrapper.import_fd(0, os.dup(fd))
    assert _count_fds() == before


def test_to_tensor_before_the_descriptor_or_after_close_is_refused() -> None:
    with _foreign_file(4096) as fd:
        wrapper = HostIPCWrapper.from_descriptor(_descriptor(fd))
        with pytest.raises(ShareError, match="has not come"):
            wrapper.to_tensor()
        wrapper.close()
        with pytest.raises(ShareError, match="closed"):
            wrapper.to_tensor()
    with HostIPCWrapper(allocate_shared((4,))) as exported:
        pass
    with pytest.raises(ShareError, match="closed"):
        exported.to_tensor()
    with pytest.raises(IndexError):
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
    with _foreign_file(4096) as fd:
        inode = os.fstat(fd).st_ino
        wrapper = _import(fd)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del wrapper
            gc.collect()
        assert [w.category for w in caught] == [ResourceWarning]
        table.drain()
        assert _count_mappings(inode) == 0


def test_threads_open_read_and_close_the_same_file() -> None:
    failures: list[str] = []

    def work() -> None:
        for _ in range(300):
            with _import(fd, shape=(4,), offset=8, nbytes=4) as wrapper:
                tensor = wrapper.to_tensor()
            if tensor.tolist() != [7, 7, 7, 7]:
                failures.append(str(tensor))

    with _foreign_file(4096) as fd:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        gc.collect()
        process_table().mappings.drain()
        assert not failures
        assert _count_mappings(os.fstat(fd).st_ino) == 0


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
    with _foreign_file(4096) as fd:
        descriptor = _descriptor(fd)
    with pytest.raises(AttributeError):
        descriptor.offset = 5  # type: ignore[misc]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(descriptor), type=HostDescriptor) == descriptor
