"""Files and descriptors made to do harm, and descriptors that go while they are in use."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import pytest

from doubles.host_files import count_fds, describe, foreign_file, import_file
from kvferry.errors import ShareError
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.shared_memory import Segment
from kvferry.ipc.table import process_table


def _huge_pages() -> int:
    fd = os.memfd_create("huge", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 2 << 20)
    return fd


def _pipe() -> int:
    one, two = os.pipe()
    os.close(two)
    return one


@pytest.mark.parametrize(
    "make",
    [
        lambda: os.open("/dev/zero", os.O_RDWR),
        lambda: os.open("/etc/passwd", os.O_RDONLY),
        lambda: os.open("/proc/self/mem", os.O_RDWR),
        lambda: os.open("/tmp", os.O_PATH),
        _pipe,
        _huge_pages,
    ],
    ids=["/dev/zero", "another's file", "/proc/self/mem", "path only", "pipe", "huge pages"],
)
def test_what_is_no_plain_memory_file_is_refused_though_it_is_described_well(make: Any) -> None:
    before = count_fds()
    fd = make()
    with foreign_file(4096) as good:
        status = os.fstat(fd)
        changes = {"file_device": status.st_dev, "inode": status.st_ino}
        with (
            HostIPCWrapper.from_descriptor(describe(good, **changes)) as wrapper,
            pytest.raises(ShareError, match="file descriptor that came"),
        ):
            wrapper.import_fd(0, fd)
    assert count_fds() == before


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_APPEND], ids=["read only", "append"])
@pytest.mark.parametrize("seals", [0, 2], ids=["unsealed", "sealed"])
def test_who_may_only_read_does_not_get_to_write_by_the_mapping_of_another(
    mapped: bool, flags: int, seals: int
) -> None:
    with foreign_file(4096, seals) as fd, contextlib.ExitStack() as kept:
        if mapped and seals:
            kept.enter_context(import_file(fd)).to_tensor()
        less = os.open(f"/proc/self/fd/{fd}", flags)
        with (
            HostIPCWrapper.from_descriptor(describe(fd)) as wrapper,
            pytest.raises(ShareError, match="not open for reading and writing"),
        ):
            wrapper.import_fd(0, less)
    process_table().mappings.drain()


def test_a_file_that_is_cut_between_the_check_and_the_read_is_one_error() -> None:
    with foreign_file(1 << 16, 0) as fd, import_file(fd) as wrapper:
        os.ftruncate(fd, 0)
        with pytest.raises(ShareError, match="cut"):
            wrapper.read_into(bytearray(1 << 16))
        wrapper.write_from(b"x" * 100)  # makes it longer again, inside what was described
        assert os.fstat(fd).st_size == 100


def test_close_during_a_transfer_never_reaches_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """After close() the kernel gives the file's number to the next file that is opened."""
    real = os.pwritev
    with foreign_file(8192, 0) as fd, foreign_file(8192, 0, fill=1) as innocent:
        wrapper = import_file(fd)
        taken: list[int] = []

        def slow(number: int, buffers: list[memoryview], offset: int) -> int:
            wrapper.close()
            taken.extend(os.dup(innocent) for _ in range(4))
            return real(number, buffers, offset)

        monkeypatch.setattr(os, "pwritev", slow)
        wrapper.write_from(b"\xff" * 8192)
        for number in taken:
            os.close(number)
        assert os.pread(innocent, 8192, 0) == b"\x01" * 8192
        assert os.pread(fd, 8192, 0) == b"\xff" * 8192


def test_a_segment_that_closes_gives_no_number_that_is_another_file_by_now() -> None:
    wrong: list[int] = []
    with foreign_file(4096) as other:
        for _ in range(300):
            segment = Segment(4096)
            inode = segment.identity.inode
            tensor = segment.tensor()
            wrapper = HostIPCWrapper(tensor)
            done = threading.Event()

            def export(wrapper: HostIPCWrapper = wrapper, inode: int = inode, done: threading.Event = done) -> None:
                while not done.is_set():
                    try:
                        fd = wrapper.export_fd(0)
                    except ShareError:
                        return
                    if os.fstat(fd).st_ino != inode:
                        wrong.append(fd)
                    os.close(fd)

            thread = threading.Thread(target=export)
            thread.start()
            segment.close()
            stolen = os.dup(other)
            done.set()
            thread.join(10)
            os.close(stolen)
            wrapper.close()
    assert not wrong


def test_a_size_beyond_64_bits_is_a_share_error() -> None:
    before = count_fds()
    with pytest.raises(ShareError):
        Segment(1 << 70)
    assert count_fds() == before
