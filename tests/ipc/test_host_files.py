"""HostIPCWrapper: the files that come from a peer, checked before they are touched; unsealed ones."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from doubles.host_files import count_fds, count_mappings, describe, foreign_file, import_file
from kvferry.errors import MappingBoundsError, ShareError
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.shared_memory import FileIdentity
from kvferry.ipc.table import process_table


@pytest.mark.parametrize("seals", [0, 4], ids=["none", "grow only"])
def test_an_unsealed_file_is_never_mapped_but_read_and_written_within_bounds(seals: int) -> None:
    before = count_fds()
    with foreign_file(8192, seals) as fd:
        with import_file(fd, shape=(100,), offset=4000, nbytes=100) as wrapper:
            with pytest.raises(ShareError, match="read_into"):
                wrapper.to_tensor()
            assert count_mappings(os.fstat(fd).st_ino) == 0
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
    assert count_fds() == before


def test_large_reads_go_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = os.preadv

    def spy(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(len(buffers[0]))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    nbytes = (8 << 20) + 5
    with foreign_file(nbytes, 0) as fd, import_file(fd) as wrapper:
        buffer = bytearray(nbytes)
        wrapper.read_into(buffer)
    assert sizes == [8 << 20, 5]
    assert buffer.count(7) == nbytes


def test_a_sealed_file_is_not_read_through_calls() -> None:
    with foreign_file(4096) as fd, import_file(fd) as wrapper, pytest.raises(ShareError, match="to_tensor"):
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
    before = count_fds()
    with foreign_file(4096) as fd, HostIPCWrapper.from_descriptor(describe(fd)) as wrapper:
        other = make()
        with pytest.raises(ShareError, match="file descriptor that came"):
            wrapper.import_fd(0, other)
    assert count_fds() == before


def test_a_shorter_or_other_file_than_described_is_refused() -> None:
    before = count_fds()
    with foreign_file(4096) as fd, foreign_file(4096) as other:
        for changes in ({"file_size": 8192}, {"inode": FileIdentity.of(other).inode}, {"file_device": 1 << 40}):
            with pytest.raises(ShareError, match="another file"):
                import_file(fd, **changes)
    assert count_fds() == before


def test_a_file_that_may_not_be_written_is_refused() -> None:
    with foreign_file(4096) as fd:
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        wrapper = HostIPCWrapper.from_descriptor(describe(fd))
        with wrapper, pytest.raises(ShareError, match="not open for reading and writing"):
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
    with foreign_file(4096) as fd, pytest.raises(ValueError):
        describe(fd, **changes)


def test_file_descriptors_in_wrong_places_are_refused_and_closed() -> None:
    before = count_fds()
    with foreign_file(4096) as fd:
        with import_file(fd) as wrapper:
            for index in (0, 1, -1):
                with pytest.raises((ShareError, IndexError)):
                    wrapper.import_fd(index, os.dup(fd))
            with pytest.raises(ShareError, match="only the exporter"):
                wrapper.export_fd(0)
            with pytest.raises(IndexError):
                wrapper.export_fd(1)
        with pytest.raises(ShareError):
            wrapper.import_fd(0, os.dup(fd))
    assert count_fds() == before
