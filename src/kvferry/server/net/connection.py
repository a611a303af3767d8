"""One client's socket, as the loop thread sees it: frames in, a bounded queue of frames out."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable

from kvferry.errors import ProtocolError
from kvferry.protocol.framing import MAX_FRAME_BYTES, MAX_GREETING_BYTES, Frame, encode_frame, receive, request_reader
from kvferry.protocol.messages import Message, Request
from kvferry.server.net.loop import READ, WRITE, Loop

_LOG = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 8 << 20
TURN_S = 0.002  # of the loop's time, until others have theirs

OnFrame = Callable[[Frame[Request]], None]
OnEnd = Callable[[str, bool], None]


class Connection:
    """Reads and writes without ever waiting. Owns the socket.

    `on_end(text, gone)` is called where the peer hung up (`gone`: nothing more will come) or broke the protocol; the
    owner then decides what is still sent, and closes, which tells the peer that nothing of it is in use any more. A
    descriptor that comes with a frame is the callee's.
    """

    def __init__(self, sock: socket.socket, loop: Loop[object], *, on_frame: OnFrame, on_end: OnEnd) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = loop
        self._on_frame = on_frame
        self._on_end = on_end
        self._reader = request_reader()
        self._reader.max_bytes = MAX_GREETING_BYTES
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._reading = True
        self._at_end = False  # nothing more will come
        self._muted = False  # nothing more can be said
        self._close_when_sent = False
        self._has_more = False  # frames that have come and wait for the next turn
        self._events = READ
        self.heard_at = time.monotonic()
        self._begun_at: float | None = None
        self._loop.watch(sock.fileno(), READ, self._on_ready)

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def lift_limit(self) -> None:
        """The peer is welcome: take frames of any size."""
        self._reader.max_bytes = MAX_FRAME_BYTES

    def send(self, message: Message) -> None:
        """Queue a frame, and send at once what the socket takes. A peer that does not read is ended."""
        if self.closed or self._muted or self._close_when_sent:
            return
        data = encode_frame(message)
        self._queue.append(memoryview(data))
        self._queued_bytes += len(data)
        self._flush()
        if self._queued_bytes > MAX_QUEUED_BYTES:
            self._end(f"the client left {MAX_QUEUED_BYTES} bytes of replies unread")

    def is_overdue(self, now: float, frame_s: float) -> bool:
        """Whether the rest of a frame has been awaited for longer than that."""
        return self._reading and self._begun_at is not None and now - self._begun_at > frame_s

    def stop_reading(self) -> None:
        """Handle no more frames; the peer's hanging up is still noticed."""
        self._reading = False

    def finish(self) -> None:
        """Close once all that is queued has been sent; the owner sets a limit and calls `close` then."""
        self._reading = False
        self._close_when_sent = True
        self._flush()

    def close(self) -> None:
        """Close at once. Idempotent."""
        if not self.closed:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._reader.close()
            self._queue.clear()
            self._on_frame, self._on_end = _nobody_hears, _nobody_hears  # who holds us: so nothing holds the other

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ and not self.closed:
            self._guard(self._read)

    def _guard(self, step: Callable[[], None]) -> None:
        """Do a step; whatever goes wrong in it ends this session, and no other."""
        try:
            step()
        except ProtocolError as error:
            self._reading = False
            self._on_end(str(error), False)
        except OSError as error:
            self._end(f"the client hung up: {error}")
        except Exception as error:  # noqa: BLE001 - a mistake of ours that one session's frames bring up
            _LOG.exception("a client's frames could not be handled")
            self._reading = False
            self._on_end(f"the server failed: {type(error).__name__}", False)

    def _read(self) -> None:
        try:
            data, fds = receive(self._socket)
        except BlockingIOError:
            return
        if not data:
            self._at_end = True
            self._reading = False
            self._watch()
            self._on_end("the client hung up", True)
            return
        if not self._reading:
            for fd in fds:
                os.close(fd)
            return
        self.heard_at = time.monotonic()
        self._reader.feed(data, fds)
        self._handle_frames()

    def _handle_frames(self) -> None:
        """Handle frames for a turn's time; where more have come they wait for the next turn, and no more are read."""
        turn_ends_at = time.monotonic() + TURN_S
        self._has_more = False
        while self._reading and not self.closed and not self._has_more:
            frame = self._reader.next_frame()
            if frame is None:
                break
            self._begun_at = None
            self._on_frame(frame)
            self._has_more = time.monotonic() > turn_ends_at
        if self._has_more:
            self._loop.soon(lambda: self._guard(self._handle_frames))
        elif self._reader.unfinished:
            self._begun_at = self._begun_at or time.monotonic()
        self._watch()

    def _flush(self) -> None:
        if self.closed:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                while self._queue:
                    self._send_first()
        except OSError as error:
            self._end(f"the client hung up: {error}")
        if self._close_when_sent and not self._queue:
            self.close()
        self._watch()

    def _watch(self) -> None:
        """Wait for what can still happen; at the end of the stream that would always be "readable"."""
        events = (0 if self._at_end or (self._has_more and self._reading) else READ) | (WRITE if self._queue else 0)
        if self.closed or events == self._events:
            return
        self._events = events
        if events:
            self._loop.watch(self._socket.fileno(), events, self._on_ready)
        else:
            self._loop.forget(self._socket.fileno())

    def _send_first(self) -> None:
        sent = self._socket.send(self._queue[0])
        self._queued_bytes -= sent
        if sent == len(self._queue[0]):
            self._queue.popleft()
        else:
            self._queue[0] = self._queue[0][sent:]

    def _end(self, text: str) -> None:
        """The peer is gone, or as good as that: nothing more is read or sent."""
        self._reading = False
        self._at_end = self._muted = True
        self._queue.clear()
        self._queued_bytes = 0
        self._watch()
        self._on_end(text, True)


def _nobody_hears(*_: object) -> None:
    """What is said of a connection that is closed."""
