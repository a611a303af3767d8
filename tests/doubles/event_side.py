"""One side of a ring of events, in this process or, by JSON lines, in a child; over the driver double or a GPU.

`python -m doubles.event_side FAKE SOCKET_FD`; see `side.py` for the form of requests and replies.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch

from doubles.child import Child
from doubles.fake_cuda import FakeDriver
from kvferry.cuda.device import bound
from kvferry.cuda.driver import driver, set_driver_for_testing
from kvferry.cuda.memory import tensor_from_pointer
from kvferry.cuda.stream import Event, Stream
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
from kvferry.ipc.raw import RawCudaIPCWrapper
from kvferry.ipc.table import process_table
from kvferry.ipc.wrapper import DeviceIPCWrapper

BUFFER_BYTES = 1 << 20
_CYCLES_A_SECOND = 2_000_000_000


class EventSide:
    """Records, or waits; owns a buffer, a stream, and one end of a ring. Device 0."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.ring: EventRing | None = None
        self.events: PeerEvents | None = None
        self.stream: Stream | None = None
        self.own: torch.Tensor | None = None
        self.theirs: torch.Tensor | None = None
        self.wrappers: list[DeviceIPCWrapper] = []
        self.address = 0

    def start(self) -> dict[str, Any]:
        """A stream and a buffer of our own."""
        self.stream = Stream(0)
        with bound(0) as drv:
            self.address = drv.mem_alloc(BUFFER_BYTES)
        self.own = tensor_from_pointer(self.address, BUFFER_BYTES, device=0, owner=None)
        return {}

    def make(
        self, isolated: bool = False, slots: int = 8, host: bool = False, in_device_memory: bool = False
    ) -> dict[str, Any]:
        self.ring = make_event_ring(None if host else 0, isolated, slots, in_device_memory=in_device_memory)
        return self._sent(encode_events(self.ring))

    def make_waiting(self, slots: int = 8, on_device: bool = False) -> dict[str, Any]:
        """The waiting end, with memory of our own."""
        memory = None
        if on_device:
            assert self.own is not None
            memory = self.own[: slots * 8].view(torch.int64)
        events = self.events = make_peer_events(0, slots, memory=memory)
        return self._sent(encode_events(events))

    def _sent(self, encoded: tuple[bytes, list[int]]) -> dict[str, Any]:
        data, fds = encoded
        send_fds(self.sock, b"f", fds)
        for fd in fds:
            os.close(fd)
        return {"data": base64.b64encode(data).decode()}

    def open(self, data: str) -> dict[str, Any]:
        self.events = open_events(base64.b64decode(data), recv_fds(self.sock, 1, 8)[1])
        return {"kind": type(self.events).__name__}

    def open_ring(self, data: str) -> dict[str, Any]:
        self.ring = open_event_ring(base64.b64decode(data), recv_fds(self.sock, 1, 8)[1])
        return {}

    def send_buffer(self) -> dict[str, Any]:
        assert self.own is not None
        wrapper = RawCudaIPCWrapper(self.own)
        self.wrappers.append(wrapper)
        send(self.sock, [wrapper])
        return {}

    def receive_buffer(self) -> dict[str, Any]:
        [wrapper] = recv(self.sock)
        self.wrappers.append(wrapper)
        self.theirs = wrapper.to_tensor()
        return {}

    def work(self, spin_s: float, value: int = 7) -> dict[str, Any]:
        """Zero our buffer; then, in the stream, spin, fill, and record."""
        assert self.stream is not None
        assert self.ring is not None
        self.stream.memset_async(self.address, 0, BUFFER_BYTES)
        self.stream.synchronize()
        self._spin(spin_s)
        self.stream.memset_async(self.address, value, BUFFER_BYTES)
        ticket = self.ring.record(self.stream.handle)
        return {"ticket": [ticket.slot, ticket.value]}

    def _spin(self, seconds: float) -> None:
        assert self.stream is not None
        drv = driver()
        if isinstance(drv, FakeDriver):
            with bound(0):
                drv.fake.stream(self.stream.handle).push(partial(time.sleep, seconds))
            return
        cuda: Any = torch.cuda  # its stream classes are not typed
        with cuda.stream(cuda.ExternalStream(self.stream.handle, device=0)):
            cuda._sleep(int(seconds * _CYCLES_A_SECOND))

    def record(self, within_s: float = 5.0) -> dict[str, Any]:
        assert self.ring is not None
        ticket = self.ring.record(self.stream.handle if self.stream else None, within_s)
        return {"ticket": [ticket.slot, ticket.value]}

    def release(self, ticket: list[int]) -> dict[str, Any]:
        assert self.ring is not None
        self.ring.release(Ticket(*ticket))
        return {}

    def churn(self, number: int = 1000) -> dict[str, Any]:
        """Make and destroy other events, and collect garbage."""
        gc.collect()
        for _ in range(number):
            with Event(0, interprocess=True) as event:
                event.record(0)
        gc.collect()
        return {}

    def query(self, ticket: list[int]) -> dict[str, Any]:
        assert self.events is not None
        return {"reached": self.events.query(Ticket(*ticket))}

    def wait(self, ticket: list[int], within_s: float) -> dict[str, Any]:
        assert self.events is not None
        self.events.wait(Ticket(*ticket), within_s)
        return {}

    def hold_stream(self, ticket: list[int]) -> dict[str, Any]:
        assert self.events is not None
        assert self.stream is not None
        self.events.wait_on_stream(Ticket(*ticket), self.stream.handle)
        return {}

    def stream_idle(self, timeout_s: float = 0.0) -> dict[str, Any]:
        assert self.stream is not None
        deadline = time.monotonic() + timeout_s
        while not self.stream.query() and time.monotonic() < deadline:
            time.sleep(0.001)
        return {"idle": self.stream.query()}

    def read(self) -> dict[str, Any]:
        """Copy the other's buffer, in a new stream: its least and greatest byte."""
        assert self.theirs is not None
        host = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        with Stream(0) as reader:
            reader.memcpy_async(host.data_ptr(), self.theirs.data_ptr(), BUFFER_BYTES)
            reader.synchronize()
        return {"bytes": [int(host.min()), int(host.max())]}

    def abandon(self) -> dict[str, Any]:
        assert self.events is not None
        self.events.abandon()
        return {}

    def close(self) -> dict[str, Any]:
        for end in (self.events, self.ring, *self.wrappers):
            if end is not None:
                end.close()
        self.events = self.ring = self.own = self.theirs = None
        self.wrappers.clear()
        gc.collect()
        process_table().mappings.drain(timeout_s=20)
        if self.stream is not None:
            self.stream.close()
        if self.address:
            with bound(0) as drv:
                drv.mem_free(self.address)
        self.stream, self.address = None, 0
        return {"open_fds": len(os.listdir("/proc/self/fd")), "mapped": process_table().mappings.stats().mapped}


class EventChild(Child):
    """An `EventSide` in a child process."""

    def __init__(self, *, fake: bool) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(30)
        tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "doubles.event_side", "1" if fake else "0", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                cwd=tests,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])},
            )


def main() -> None:
    if sys.argv[1] == "1":
        set_driver_for_testing(FakeDriver())
    side = EventSide(socket.socket(fileno=int(sys.argv[2])))
    for line in sys.stdin:
        request = json.loads(line)
        operation = getattr(side, request.pop("op"))
        try:
            reply = operation(**request)
        except Exception as error:  # noqa: BLE001 - sent to the test, which decides
            reply = {"error": str(error), "kind": type(error).__name__}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
