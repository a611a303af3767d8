"""One process's memory, usable in another: a wrapper for each kind of memory, one wire format, events."""

from __future__ import annotations

from kvferry.ipc.descriptor import WrapperDescriptor
from kvferry.ipc.events import (
    EventRing,
    PeerEvents,
    Ticket,
    encode_events,
    make_event_ring,
    make_peer_events,
    open_event_ring,
    open_events,
)
from kvferry.ipc.fds import recv, recv_fds, send, send_fds
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.permute import assert_contiguous, attempt_permute_to_contiguous_view
from kvferry.ipc.policy import IPCPolicy, wrap
from kvferry.ipc.raw import RawCudaIPCWrapper
from kvferry.ipc.shared_memory import Segment, allocate_shared, rehome
from kvferry.ipc.table import process_table
from kvferry.ipc.torch_storage import CudaIPCWrapper
from kvferry.ipc.vmm import VmmCudaIPCWrapper
from kvferry.ipc.wire import decode, decode_descriptors, encode, encode_descriptors, fd_slots
from kvferry.ipc.wrapper import DeviceIPCWrapper

__all__ = [
    "CudaIPCWrapper",
    "DeviceIPCWrapper",
    "EventRing",
    "HostIPCWrapper",
    "IPCPolicy",
    "PeerEvents",
    "RawCudaIPCWrapper",
    "Segment",
    "Ticket",
    "VmmCudaIPCWrapper",
    "WrapperDescriptor",
    "allocate_shared",
    "assert_contiguous",
    "attempt_permute_to_contiguous_view",
    "decode",
    "decode_descriptors",
    "encode",
    "encode_descriptors",
    "encode_events",
    "fd_slots",
    "make_event_ring",
    "make_peer_events",
    "open_event_ring",
    "open_events",
    "process_table",
    "recv",
    "recv_fds",
    "rehome",
    "send",
    "send_fds",
    "wrap",
]
