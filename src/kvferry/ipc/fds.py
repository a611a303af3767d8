"""Wrappers and their file descriptors over a Unix stream socket, a bounded number at a time.

The exchange, every step of which has a time-out: the sender sends the message (`wire.py`); the receiver reads and
checks it, and acknowledges; then, until all have gone, the sender exports at most `BATCH_FDS` descriptors, sends them,
closes its own, and waits; the receiver takes them in, closes them, and acknowledges. So neither side ever has more than
one batch open, whatever the size of the transfer. A frame is `_FRAME`: magic, kind, number.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvferry.errors import DeadlineError, ShareError, WireError
from kvferry.ipc.wire import MAX_MESSAGE_BYTES, close_fds, decode_descriptors, encode_descriptors, fd_slots

if TYPE_CHECKING:
    from kvferry.ipc.wrapper import DeviceIPCWrapper

# The kernel takes 253 in one message; half of that also fits beside a process's other files under small limits.
BATCH_FDS = 128

_FRAME = struct.Struct("<4ssI")
_MAGIC = b"KVF1"
_MESSAGE, _BATCH, _DONE, _REFUSED = b"M", b"B", b"A", b"R"
_MAX_TEXT_BYTES = 4096


class _RefusedError(ShareError):
    """The other process gave up, and said why."""


def send_fds(sock: socket.socket, payload: bytes | memoryview, fds: Sequence[int] = ()) -> int:
    """One `sendmsg`: as much of `payload` as goes, and all of `fds` with its first byte; the number of bytes sent.

    The caller keeps its descriptors, and closes them. Raises what the socket raises.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return sock.sendmsg([payload], rights)


def recv_fds(sock: socket.socket, nbytes: int, max_fds: int = 0) -> tuple[bytes, list[int]]:
    """One `recvmsg`: up to `nbytes` bytes and the descriptors with them, close-on-exec, the caller's to close.

    No bytes means that the peer has closed the socket. Raises what the socket raises, and:

    Raises
    ------
    WireError
        More than `max_fds` descriptors came, or this process has no room for them; none stays open.
    """
    room = socket.CMSG_SPACE(max_fds * array.array("i").itemsize) if max_fds else 0
    data, ancillary, flags, _ = sock.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
    if flags & socket.MSG_CTRUNC or len(fds) > max_fds:
        close_fds(fds)
        raise WireError(
            f"file descriptors were lost: more than the {max_fds} expected came, or this process may open no more "
            "(ulimit -n)"
        )
    return data, list(fds)


def send(sock: socket.socket, wrappers: Sequence[DeviceIPCWrapper], timeout_s: float = 10.0) -> None:
    """Send `wrappers` and their file descriptors; returns when the receiver has taken all of them in.

    Blocks, each step at most `timeout_s`. The wrappers stay the caller's. After an error the socket is in the middle of
    an exchange: close it. No descriptor made here stays open in any case.

    Raises
    ------
    DeadlineError
        The receiver fell silent.
    WireError
        The receiver went away, or broke the exchange.
    ShareError
        The receiver could not open what was sent, or a wrapper can no longer be exported.
    """
    data = encode_descriptors(wrappers)
    slots = fd_slots(wrappers)
    with _peer_errors(sock, timeout_s), _telling_peer(sock, timeout_s):
        _send_frame(sock, _MESSAGE, len(data), timeout_s, body=data)
        _expect_done(sock, 0, timeout_s)
        for start in range(0, len(slots), BATCH_FDS):
            batch = slots[start : start + BATCH_FDS]
            with contextlib.ExitStack() as opened:
                fds = []
                for wrapper, index in batch:
                    fds.append(wrapper.export_fd(index))
                    opened.callback(os.close, fds[-1])
                _send_frame(sock, _BATCH, len(fds), timeout_s, fds=fds)
            _expect_done(sock, len(batch), timeout_s)


def recv(sock: socket.socket, timeout_s: float = 10.0) -> list[DeviceIPCWrapper]:
    """The wrappers that `send` sends at the other end, with their memory opened; the caller closes them.

    Blocks, each step at most `timeout_s`. After an error nothing that came stays open; close the socket.

    Raises
    ------
    DeadlineError
        The sender fell silent.
    WireError
        The sender went away, or sent what is no valid message, or too few or too many file descriptors.
    ShareError
        The memory cannot be opened here.
    """
    wrappers: list[DeviceIPCWrapper] = []
    with _peer_errors(sock, timeout_s), _telling_peer(sock, timeout_s):
        try:
            nbytes = _recv_frame(sock, _MESSAGE, timeout_s)[0]
            if nbytes > MAX_MESSAGE_BYTES:
                raise WireError(f"a message of {nbytes} bytes was announced; at most {MAX_MESSAGE_BYTES} are read")
            wrappers = decode_descriptors(_recv_exactly(sock, nbytes, timeout_s)[0])
            _recv_batches(sock, fd_slots(wrappers), timeout_s)
        except BaseException:
            for wrapper in wrappers:
                wrapper.close()
            raise
    return wrappers


def _recv_batches(sock: socket.socket, slots: list[tuple[DeviceIPCWrapper, int]], timeout_s: float) -> None:
    _send_frame(sock, _DONE, 0, timeout_s)
    for start in range(0, len(slots), BATCH_FDS):
        batch = slots[start : start + BATCH_FDS]
        number, left = _recv_frame(sock, _BATCH, timeout_s, max_fds=len(batch))
        try:
            if not number == len(left) == len(batch):
                raise WireError(f"{len(left)} file descriptors came, {number} were announced, {len(batch)} are needed")
            for wrapper, index in batch:
                wrapper.import_fd(index, left.pop(0))
        finally:
            close_fds(left)
        _send_frame(sock, _DONE, len(batch), timeout_s)


@contextlib.contextmanager
def _peer_errors(sock: socket.socket, timeout_s: float) -> Iterator[None]:
    """Turn what the socket raises into this module's errors, and leave its time-out as it was."""
    before = sock.gettimeout()
    try:
        yield
    except TimeoutError as error:
        if isinstance(error, DeadlineError):
            raise
        raise DeadlineError(f"the other process did not go on with the exchange within {timeout_s} s") from error
    except ConnectionError as error:
        raise WireError(f"the other process went away in the middle of the exchange: {error}") from error
    except OSError as error:
        raise ShareError(f"file descriptors could not be passed: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            sock.settimeout(before)


def _send_frame(
    sock: socket.socket, kind: bytes, number: int, timeout_s: float, *, fds: Sequence[int] = (), body: bytes = b""
) -> None:
    rest = memoryview(_FRAME.pack(_MAGIC, kind, number) + body)
    deadline = time.monotonic() + timeout_s
    while rest:
        sock.settimeout(_remaining(deadline))
        rest = rest[send_fds(sock, rest, fds) :]
        fds = ()  # they went with the first byte


def _recv_frame(sock: socket.socket, kind: bytes, timeout_s: float, *, max_fds: int = 0) -> tuple[int, list[int]]:
    """The number and the file descriptors of the next frame, which must be of `kind`."""
    head, fds = _recv_exactly(sock, _FRAME.size, timeout_s, max_fds=max_fds)
    magic, arrived, number = _FRAME.unpack(head)
    if magic == _MAGIC and arrived == kind:
        return int(number), fds
    close_fds(fds)
    if magic == _MAGIC and arrived == _REFUSED:
        text = _recv_exactly(sock, min(number, _MAX_TEXT_BYTES), timeout_s)[0].decode("utf-8", "replace")
        raise _RefusedError(f"the other process refused: {text}")
    raise WireError(f"a frame {magic!r} {arrived!r} came, wanted {_MAGIC!r} {kind!r}")


def _recv_exactly(sock: socket.socket, nbytes: int, timeout_s: float, *, max_fds: int = 0) -> tuple[bytes, list[int]]:
    data, fds = bytearray(), list[int]()
    deadline = time.monotonic() + timeout_s
    try:
        while len(data) < nbytes:
            sock.settimeout(_remaining(deadline))
            piece, more = recv_fds(sock, min(nbytes - len(data), 1 << 20), max_fds - len(fds))
            fds += more
            if not piece:
                raise ConnectionResetError(f"the socket was closed after {len(data)} of {nbytes} bytes")
            data += piece
    except BaseException:
        close_fds(fds)
        raise
    return bytes(data), fds


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("no time left")
    return remaining


def _expect_done(sock: socket.socket, number: int, timeout_s: float) -> None:
    acknowledged = _recv_frame(sock, _DONE, timeout_s)[0]
    if acknowledged != number:
        raise WireError(f"{acknowledged} file descriptors were acknowledged, {number} were sent")


@contextlib.contextmanager
def _telling_peer(sock: socket.socket, timeout_s: float) -> Iterator[None]:
    """Tell the other process why this one gives up, best effort, unless it is the other that is gone or silent."""
    try:
        yield
    except (TimeoutError, ConnectionError, _RefusedError):
        raise
    except Exception as error:
        body = str(error).encode()[:_MAX_TEXT_BYTES]
        with contextlib.suppress(OSError):
            _send_frame(sock, _REFUSED, len(body), min(timeout_s, 1.0), body=body)
        raise
