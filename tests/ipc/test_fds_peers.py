"""Passing wrappers to and from peers that misbehave, fall silent, or die: one error each, and no descriptor left."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from doubles.host_files import close_all, count_fds, exported_rows
from kvferry.errors import DeadlineError, ShareError, WireError
from kvferry.ipc.fds import BATCH_FDS, recv, send, send_fds
from kvferry.ipc.wire import encode_descriptors
from kvferry.ipc.wrapper import DeviceIPCWrapper

Pair = tuple[socket.socket, socket.socket]


def _frame(kind: bytes, number: int) -> bytes:
    return struct.pack("<4ssI", b"KVF1", kind, number)


# --- a sender that misbehaves; `recv` runs in this thread's stead, `peer` speaks by hand ---


def _receive_from(pair: Pair, pool: ThreadPoolExecutor, peer: Callable[[socket.socket], None]) -> Exception:
    """What `recv` raises against `peer`; checks that no descriptor is left."""
    before = count_fds()
    receiving: Future[list[DeviceIPCWrapper]] = pool.submit(recv, pair[1], 0.5)
    peer(pair[0])
    error = receiving.exception(10)
    assert isinstance(error, Exception)
    assert count_fds() == before
    return error


def _start(sock: socket.socket, number: int) -> list[int]:
    """Send the message of `number` wrappers and read the acknowledgement; their descriptors."""
    wrappers = exported_rows(number)
    data = encode_descriptors(wrappers)
    sock.sendall(_frame(b"M", len(data)) + data)
    assert sock.recv(9) == _frame(b"A", 0)
    fds = [wrapper.export_fd(0) for wrapper in wrappers]
    close_all(wrappers)
    return fds


def _send_batch(sock: socket.socket, announced: int, fds: list[int]) -> None:
    send_fds(sock, _frame(b"B", announced), fds)
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize(
    ("announced", "drop", "text"),
    [(3, 1, "2 file descriptors came, 3 were announced, 3"), (2, 1, "2 were announced, 3"), (3, 3, "0 file desc")],
)
def test_too_few_descriptors(pair: Pair, pool: ThreadPoolExecutor, announced: int, drop: int, text: str) -> None:
    def peer(sock: socket.socket) -> None:
        fds = _start(sock, 3)
        for _ in range(drop):
            os.close(fds.pop())
        _send_batch(sock, announced, fds)

    error = _receive_from(pair, pool, peer)
    assert isinstance(error, WireError)
    assert text in str(error)


@pytest.mark.parametrize("more", [1, 2, 100])
def test_too_many_descriptors(pair: Pair, pool: ThreadPoolExecutor, more: int) -> None:
    def peer(sock: socket.socket) -> None:
        fds = _start(sock, 3)
        _send_batch(sock, 3, fds + [os.open("/dev/null", os.O_RDONLY) for _ in range(more)])

    assert isinstance(_receive_from(pair, pool, peer), WireError)


def test_descriptors_where_none_belong(pair: Pair, pool: ThreadPoolExecutor) -> None:
    def peer(sock: socket.socket) -> None:
        fd = os.open("/dev/null", os.O_RDONLY)
        send_fds(sock, _frame(b"M", 4), [fd])
        os.close(fd)

    assert isinstance(_receive_from(pair, pool, peer), WireError)


def test_a_wrong_file_is_refused_and_the_sender_told(pair: Pair, pool: ThreadPoolExecutor) -> None:
    def peer(sock: socket.socket) -> None:
        fds = _start(sock, 2)
        os.close(fds.pop())
        _send_batch(sock, 2, [*fds, os.open("/dev/null", os.O_RDONLY)])
        head = sock.recv(9)
        assert head[4:5] == b"R"
        assert b"not a memory file" in sock.recv(struct.unpack("<I", head[5:])[0])

    assert isinstance(_receive_from(pair, pool, peer), ShareError)


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n", _frame(b"B", 0), _frame(b"M", 1 << 31), _frame(b"M", 3) + b"abc", b"KVF2M" + b"\0" * 4],
    ids=["http", "batch first", "oversized", "no message", "other magic"],
)
def test_bytes_that_are_no_exchange(pair: Pair, pool: ThreadPoolExecutor, data: bytes) -> None:
    assert isinstance(_receive_from(pair, pool, lambda sock: sock.sendall(data)), WireError)


@pytest.mark.parametrize("sent", [b"", _frame(b"M", 9)[:5], _frame(b"M", 9) + b"abc"])
def test_a_silent_sender(pair: Pair, pool: ThreadPoolExecutor, sent: bytes) -> None:
    began = time.monotonic()
    assert isinstance(_receive_from(pair, pool, lambda sock: sock.sendall(sent)), DeadlineError)
    assert time.monotonic() - began < 3


def test_a_sender_that_trickles_does_not_hold_the_receiver(pair: Pair, pool: ThreadPoolExecutor) -> None:
    def peer(sock: socket.socket) -> None:
        data = _frame(b"M", 1000) + bytes(1000)
        for at in range(12):
            sock.sendall(data[at : at + 1])
            time.sleep(0.15)

    began = time.monotonic()
    assert isinstance(_receive_from(pair, pool, peer), DeadlineError)
    assert time.monotonic() - began < 3


def test_a_sender_that_closes_with_a_batch_unread(pair: Pair, pool: ThreadPoolExecutor) -> None:
    def peer(sock: socket.socket) -> None:
        fds = _start(sock, 200)
        for fd in fds[BATCH_FDS:]:
            os.close(fd)
        _send_batch(sock, BATCH_FDS, fds[:BATCH_FDS])
        sock.shutdown(socket.SHUT_RDWR)

    error = _receive_from(pair, pool, peer)
    assert isinstance(error, WireError)
    assert "went away" in str(error)


_DYING_SENDER = """
import os, signal, socket, sys
from kvferry import ipc
class Dying(ipc.HostIPCWrapper):
    left = [%d]
    def export_fd(self, index):
        self.left[0] -= 1
        if self.left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().export_fd(index)
tensor = ipc.allocate_shared((300, 4))
ipc.send(socket.socket(fileno=int(sys.argv[1])), [Dying(row) for row in tensor], 20)
"""


@pytest.mark.parametrize("after", [130, 299])
def test_a_sender_killed_in_the_middle(pair: Pair, after: int) -> None:
    before = count_fds()
    with subprocess.Popen(
        [sys.executable, "-c", _DYING_SENDER % after, str(pair[0].fileno())], pass_fds=[pair[0].fileno()]
    ) as child:
        pair[0].close()
        with pytest.raises(WireError, match="went away"):
            recv(pair[1], 30)
        assert child.wait(10) == -signal.SIGKILL
    assert count_fds() == before - 1  # our own end of the child's socket


# --- a receiver that misbehaves ---


def _send_to(pair: Pair, pool: ThreadPoolExecutor, peer: Callable[[socket.socket], None]) -> Exception:
    """What `send` raises against `peer`, when it sends 200 wrappers; checks that no descriptor is left."""
    wrappers = exported_rows(200)
    before = count_fds()
    sending: Future[None] = pool.submit(send, pair[0], wrappers, 0.5)
    peer(pair[1])
    error = sending.exception(10)
    assert isinstance(error, Exception)
    pair[1].close()  # with what lies unread in it
    assert count_fds() == before - 1
    close_all(wrappers)
    return error


def _read_message(sock: socket.socket) -> None:
    size = struct.unpack("<4ssI", sock.recv(9, socket.MSG_WAITALL))[2]
    sock.recv(size, socket.MSG_WAITALL)


def test_a_receiver_that_never_acknowledges_the_message(pair: Pair, pool: ThreadPoolExecutor) -> None:
    assert isinstance(_send_to(pair, pool, _read_message), DeadlineError)


def test_a_receiver_that_never_acknowledges_a_batch(pair: Pair, pool: ThreadPoolExecutor) -> None:
    def peer(sock: socket.socket) -> None:
        _read_message(sock)
        sock.sendall(_frame(b"A", 0))

    assert isinstance(_send_to(pair, pool, peer), DeadlineError)


@pytest.mark.parametrize("answer", [_frame(b"A", 5), b"nonsense!", _frame(b"M", 0)])
def test_a_receiver_that_acknowledges_something_else(pair: Pair, pool: ThreadPoolExecutor, answer: bytes) -> None:
    def peer(sock: socket.socket) -> None:
        _read_message(sock)
        sock.sendall(answer)

    assert isinstance(_send_to(pair, pool, peer), WireError)


def test_a_receiver_that_goes_away(pair: Pair, pool: ThreadPoolExecutor) -> None:
    def peer(sock: socket.socket) -> None:
        _read_message(sock)
        sock.sendall(_frame(b"A", 0))
        sock.shutdown(socket.SHUT_RDWR)

    assert isinstance(_send_to(pair, pool, peer), WireError)


def test_a_receiver_that_refuses_says_why(pair: Pair, pool: ThreadPoolExecutor) -> None:
    def peer(sock: socket.socket) -> None:
        _read_message(sock)
        sock.sendall(_frame(b"R", 7) + b"no room")

    error = _send_to(pair, pool, peer)
    assert isinstance(error, ShareError)
    assert "no room" in str(error)


def test_a_wrapper_that_can_no_longer_be_exported(pair: Pair, pool: ThreadPoolExecutor) -> None:
    wrappers = exported_rows(3)
    before = count_fds()
    real = wrappers[2].export_fd

    def failing(index: int) -> int:
        os.close(real(index))
        raise OSError(24, "Too many open files")

    wrappers[2].export_fd = failing  # type: ignore[method-assign]
    receiving = pool.submit(recv, pair[1], 0.5)
    with pytest.raises(ShareError, match="Too many open files"):
        send(pair[0], wrappers, 5)
    told = receiving.exception(5)
    assert isinstance(told, ShareError)
    assert "Too many open files" in str(told)
    assert count_fds() == before
    close_all(wrappers)
