"""Host memory as a peer might send it, and counts of what is open here."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from kvferry.ipc.host import HostDescriptor, HostIPCWrapper
from kvferry.ipc.shared_memory import F_ADD_SEALS, F_SEAL_SHRINK, FileIdentity, allocate_shared
from kvferry.ipc.wrapper import DeviceIPCWrapper

_PEER = b"p" * 16


def count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def count_mappings(inode: int) -> int:
    with open("/proc/self/maps", encoding="ascii") as maps:
        return sum(line.split()[4] == str(inode) for line in maps)


@contextlib.contextmanager
def foreign_file(nbytes: int, seals: int = F_SEAL_SHRINK, fill: int = 7) -> Iterator[int]:
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


def describe(fd: int, **changes: Any) -> HostDescriptor:
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


def import_file(fd: int, **changes: Any) -> HostIPCWrapper:
    wrapper = HostIPCWrapper.from_descriptor(describe(fd, **changes))
    wrapper.import_fd(0, os.dup(fd))
    return wrapper


def exported_rows(number: int) -> list[DeviceIPCWrapper]:
    """Wrappers of the rows of one tensor; row n is filled with n."""
    tensor = allocate_shared((number, 4), torch.int32)
    tensor.copy_(torch.arange(number, dtype=torch.int32)[:, None].expand(number, 4))
    return [HostIPCWrapper(row) for row in tensor]


def close_all(wrappers: Iterable[DeviceIPCWrapper]) -> None:
    for wrapper in wrappers:
        wrapper.close()
