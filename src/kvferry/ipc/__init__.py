"""One process's memory, usable in another: a wrapper for each kind of memory, one wire format, events."""

from __future__ import annotations

from kvferry.ipc.fds import recv, recv_fds, send, send_fds
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.shared_memory import Segment, allocate_shared, rehome
from kvferry.ipc.wire import decode, decode_descriptors, encode, encode_descriptors, fd_slots
from kvferry.ipc.wrapper import DeviceIPCWrapper, WrapperDescriptor

__all__ = [
    "DeviceIPCWrapper",
    "HostIPCWrapper",
    "Segment",
    "WrapperDescriptor",
    "allocate_shared",
    "decode",
    "decode_descriptors",
    "encode",
    "encode_descriptors",
    "fd_slots",
    "recv",
    "recv_fds",
    "rehome",
    "send",
    "send_fds",
]
