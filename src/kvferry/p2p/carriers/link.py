"""One link: a socket over which the host carrier's bytes go, both ways, in frames that no side waits for.

A frame is a header and at most `FRAME_BYTES` bytes of one item. Frames of several items take turns.
"""

from __future__ import annotations

import array
import fcntl
import math
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvferry.errors import ProtocolError
from kvferry.p2p.carriers.runs import ByteRuns

FRAME_BYTES = 1 << 20
_HEADER = struct.Struct("<IQIQI")  # magic, number, item, offset in the item, bytes
_MAGIC = 0x4B56_4632
_TURN_BYTES = 4 << 20
_WASTE_BYTES = 64 << 10
_LEAST_BYTES = 64 << 10

Then = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Job:
    """An item that is sent, or that is awaited; `position` bytes of it are done."""

    number: int
    item: int
    runs: ByteRuns
    then: Then
    until: float = math.inf
    position: int = 0

    @property
    def left(self) -> int:
        return self.runs.nbytes - self.position


class Link:
    """For the thread that owns it. `on_landed(number, item)` is called for each item that is complete, unless it has
    been given a callback of its own.

    `catch_up` does what was queued for the thread before: a peer may be faster with its first bytes than the queue is
    with the place for them.
    """

    def __init__(
        self, sock: socket.socket, on_landed: Callable[[int, int], None], catch_up: Callable[[], None]
    ) -> None:
        self.socket = sock
        self._on_landed = on_landed
        self._catch_up = catch_up
        self._out: deque[_Job] = deque()
        self._out_head = memoryview(b"")  # what of the frame's header, or of a stopped job's frame, is still to go
        self._out_job: _Job | None = None
        self._out_left = 0  # bytes of the frame that come from the job
        self._in: dict[tuple[int, int], _Job] = {}
        self._in_head = bytearray()
        self._in_job: _Job | None = None  # None: the frame's bytes are nobody's
        self._in_left = 0
        self._waste = memoryview(bytearray(_WASTE_BYTES))

    @property
    def wants_to_send(self) -> bool:
        return bool(self._out or self._out_head or self._out_job)

    def send(
        self, number: int, item: int, runs: ByteRuns, *, then: Then = lambda: None, until: float = math.inf
    ) -> None:
        """Queue an item; `then` is called when the socket has taken all of it. After `until` it is late."""
        self._out.append(_Job(number, item, runs, then, until))

    def stop_sending(self, number: int) -> None:
        """Read nothing of a transfer's source any more. A frame that has begun is completed from a copy."""
        self._out = deque(job for job in self._out if job.number != number)
        job = self._out_job
        if job is not None and job.number == number:
            rest = b"".join(job.runs.buffers(job.position, self._out_left))
            while len(rest) < self._out_left:
                rest += b"".join(job.runs.buffers(job.position + len(rest), self._out_left - len(rest)))
            self._out_head = memoryview(bytes(self._out_head) + rest)
            self._out_job, self._out_left = None, 0

    def expect(
        self, number: int, item: int, runs: ByteRuns, *, then: Then | None = None, until: float = math.inf
    ) -> None:
        """Write an item that is to come into `runs`; one that has not come by `until` is late."""
        then = then or partial(self._on_landed, number, item)
        self._in[number, item] = _Job(number, item, runs, then, until)

    def is_late(self, now: float) -> bool:
        """Whether something should have come, or gone, by now."""
        going = [] if self._out_job is None else [self._out_job]
        return any(job.until < now for job in (*self._in.values(), *self._out, *going))

    def stop_landing(self, number: int) -> None:
        """Write nothing of a transfer any more; what still comes of it is read and dropped."""
        for key in [key for key in self._in if key[0] == number]:
            del self._in[key]
        if self._in_job is not None and self._in_job.number == number:
            self._in_job = None

    def flush(self) -> None:
        """Send what the socket takes, for a turn. Raises OSError where the peer is gone."""
        sent = 0
        while sent < _TURN_BYTES and self._next_frame():
            buffers: list[memoryview] = [self._out_head] if self._out_head else []
            if self._out_job is not None:
                buffers += self._out_job.runs.buffers(self._out_job.position, self._out_left)
            try:
                done = self.socket.sendmsg(buffers)
            except BlockingIOError:
                return
            sent += done
            head = min(done, len(self._out_head))
            self._out_head = self._out_head[head:]
            job = self._out_job
            if job is not None:
                job.position += done - head
                self._out_left -= done - head
                if not job.left:
                    self._out_job = None
                    job.then()

    def read(self) -> bool:
        """Take what has come, for a turn; False at the end of the stream.

        Raises ProtocolError where it is no frame, OSError where the peer is gone.
        """
        taken = 0
        while taken < _TURN_BYTES:
            try:
                done = self._read_some()
            except BlockingIOError:
                return True
            if done == 0:
                return False
            taken += done
        return True

    def _next_frame(self) -> bool:
        """Whether there is anything to send."""
        if self._out_head or self._out_left:
            return True
        job, self._out_job = self._out_job, None
        if job is not None:
            self._out.append(job)  # behind the others
        if not self._out:
            return False
        job = self._out.popleft()
        self._out_left = min(job.left, FRAME_BYTES)
        header = _HEADER.pack(_MAGIC, job.number, job.item, job.position, self._out_left)
        self._out_job, self._out_head = job, memoryview(header)
        return True

    def _read_some(self) -> int:
        if not self._in_left:
            data = self.socket.recv(_HEADER.size - len(self._in_head))
            self._in_head += data
            if len(self._in_head) == _HEADER.size:
                self._begin_frame()
            return len(data)
        job = self._in_job
        if job is None:
            done = self.socket.recv_into(self._waste, min(self._in_left, _WASTE_BYTES))
        else:
            waiting = max(_LEAST_BYTES, _waiting_bytes(self.socket))  # buffers for more would be made for nothing
            done = self.socket.recvmsg_into(job.runs.buffers(job.position, min(self._in_left, waiting)))[0]
            job.position += done
        self._in_left -= done
        if not self._in_left:
            self._end_frame()
        return done

    def _begin_frame(self) -> None:
        magic, number, item, offset, length = _HEADER.unpack(self._in_head)
        self._in_head.clear()
        if magic != _MAGIC or length > FRAME_BYTES:
            raise ProtocolError(f"what came over the link is no frame: magic {magic:#x}, {length} bytes")
        if (number, item) not in self._in:
            self._catch_up()
            if self.socket.fileno() < 0:
                raise ConnectionError("the session has ended")
        job = self._in.get((number, item))
        if job is not None and (offset != job.position or length > job.left or (job.left and not length)):
            have = f"{job.position} of {job.runs.nbytes}"
            raise ProtocolError(f"{length} bytes came for byte {offset} of item {item}, of which {have} are there")
        self._in_job, self._in_left = job, length
        if not length:
            self._end_frame()

    def _end_frame(self) -> None:
        job, self._in_job = self._in_job, None
        if job is not None and not job.left:
            del self._in[job.number, job.item]
            job.then()


def _waiting_bytes(sock: socket.socket) -> int:
    """What can be read at once."""
    found = array.array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, found)
    return found[0]
