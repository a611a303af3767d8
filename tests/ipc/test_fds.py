"""Passing wrappers and file descriptors over a Unix socket: bounds, time-outs, and peers that misbehave or die."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from kvferry.errors import DeadlineError, ShareError, WireError
from kvferry.ipc.fds import BATCH_FDS, recv, recv_fds, send, send_fds
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.shared_memory import allocate_shared
from kvferry.ipc.wire import encode_descriptors
from kvferry.ipc.wrapper import DeviceIPCWrapper

Pair = tuple[socket.socket, socket.socket]


def _frame(kind: bytes, number: int) -> bytes:
    return struct.pack("<4ssI", b"KVF1", kind, number)


def _count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _exported(number: int) -> list[DeviceIPCWrapper]:
    tensor = allocate_shared((number, 4), torch.int32)
    tensor.copy_(torch.arange(number, dtype=torch.int32)[:, None].expand(number, 4))
    return [HostIPCWrapper(row) for row in tensor]


def _close(wrappers: list[DeviceIPCWrapper]) -> None:
    for wrapper in wrappers:
        wrapper.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, two = socket.socketpair()
    with one, two:
        yield one, two


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.mark.parametrize("number", [0, 1, BATCH_FDS, BATCH_FDS + 1, 300])
def test_wrappers_arrive_in_order_and_no_descriptor_is_left(pair: Pair, pool: ThreadPoolExecutor, number: int) -> None:
    wrappers = _exported(number)
    before = _count_fds()
    sending = pool.submit(send, pair[0], wrappers, 5)
    arrived = recv(pair[1], 5)
    sending.result(5)
    assert _count_fds() == before
    assert arrived == wrappers
    assert [int(w.to_tensor()[0]) for w in arrived] == list(range(number))
    _close(arrived + wrappers)


def test_several_transfers_go_over_one_socket_and_its_time_out_stays(pair: Pair, pool: ThreadPoolExecutor) -> None:
    pair[0].settimeout(None)
    pair[1].settimeout(3.5)
    for number in (2, 3):
        wrappers = _exported(number)
        sending = pool.submit(send, pair[0], wrappers)
        arrived = recv(pair[1])
        sending.result(5)
        assert len(arrived) == number
        _close(arrived + wrappers)
    assert (pair[0].gettimeout(), pair[1].gettimeout()) == (None, 3.5)


_LIMITED = """
import os, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import torch
from kvferry import ipc
sock = socket.socket(fileno=int(sys.argv[1]))
count = lambda: len(os.listdir("/proc/self/fd"))
"""

_LIMITED_SENDER = """
tensors = [ipc.allocate_shared((250, 64), torch.int32) for _ in range(8)]
for number, tensor in enumerate(tensors):
    tensor.copy_(torch.arange(250, dtype=torch.int32)[:, None].expand(250, 64) + 250 * number)
wrappers = [ipc.HostIPCWrapper(row) for tensor in tensors for row in tensor]
before = count()
ipc.send(sock, wrappers, 20)
assert count() == before, (before, count())
"""

_LIMITED_RECEIVER = """
before = count()
wrappers = ipc.recv(sock, 20)
assert count() == before, (before, count())
rows = [w.to_tensor() for w in wrappers]
assert len(rows) == 2000 and all(row.eq(n).all() for n, row in enumerate(rows))
for w in wrappers:
    w.close()
"""


def test_two_thousand_descriptors_pass_between_processes_that_may_open_256(pair: Pair) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _LIMITED + code, str(sock.fileno())],
            pass_fds=[sock.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        for code, sock in zip((_LIMITED_SENDER, _LIMITED_RECEIVER), pair, strict=True)
    ]
    for child in children:
        try:
            _, text = child.communicate(timeout=50)
        finally:
            child.kill()
        assert child.returncode == 0, text


# --- a sender that misbehaves; `recv` runs in this thread's stead, `peer` speaks by hand ---


def _receive_from(pair: Pair, pool: ThreadPoolExecutor, peer: Callable[[socket.socket], None]) -> Exception:
    """What `recv` raises against `peer`; checks that no descriptor is left."""
    before = _count_fds()
    receiving: Future[list[DeviceIPCWrapper]] = pool.submit(recv, pair[1], 0.5)
    peer(pair[0])
    error = receiving.exception(10)
    assert isinstance(error, Exception)
    assert _count_fds() == before
    return error


def _start(sock: socket.socket, number: int) -> list[int]:
    """Send the message of `number` wrappers and read the acknowledgement; their descriptors."""
    wrappers = _exported(number)
    data = encode_descriptors(wrappers)
    sock.sendall(_frame(b"M", len(data)) + data)
    assert sock.recv(9) == _frame(b"A", 0)
    fds = [wrapper.export_fd(0) for wrapper in wrappers]
    _close(wrappers)
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


@pytest.mark.parametrize("after", [0, 130, 299])
def test_a_sender_killed_in_the_middle(pair: Pair, after: int) -> None:
    before = _count_fds()
    with subprocess.Popen(
        [sys.executable, "-c", _DYING_SENDER % after, str(pair[0].fileno())], pass_fds=[pair[0].fileno()]
    ) as child:
        pair[0].close()
        with pytest.raises(WireError, match="went away"):
            recv(pair[1], 30)
        assert child.wait(10) == -signal.SIGKILL
    assert _count_fds() == before - 1  # our own end of the child's socket


# --- a receiver that misbehaves ---


def _send_to(pair: Pair, pool: ThreadPoolExecutor, peer: Callable[[socket.socket], None]) -> Exception:
    """What `send` raises against `peer`, when it sends 200 wrappers; checks that no descriptor is left."""
    wrappers = _exported(200)
    before = _count_fds()
    sending: Future[None] = pool.submit(send, pair[0], wrappers, 0.5)
    peer(pair[1])
    error = sending.exception(10)
    assert isinstance(error, Exception)
    pair[1].close()  # with what lies unread in it
    assert _count_fds() == before - 1
    _close(wrappers)
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
    wrappers = _exported(3)
    before = _count_fds()
    real = wrappers[2].export_fd

    def failing(index: int) -> int:
        os.close(real(index))
        raise OSError(24, "Too many open files")

    wrappers[2].export_fd = failing  # type: ignore[method-assign]
    receiving = pool.submit(recv, pair[1], 0.5)
    with pytest.raises(ShareError, match="Too many open files"):
        send(pair[0], wrappers, 5)
    assert isinstance(receiving.exception(5), DeadlineError)
    assert _count_fds() == before
    _close(wrappers)


# --- the pieces ---


def test_one_call_carries_bytes_and_close_on_exec_descriptors(pair: Pair) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(fd, True)
    assert send_fds(pair[0], b"abc", [fd]) == 3
    os.close(fd)
    data, fds = recv_fds(pair[1], 10, 5)
    assert data == b"abc"
    [arrived] = fds
    assert not os.get_inheritable(arrived)
    os.close(arrived)
    pair[0].close()
    assert recv_fds(pair[1], 10, 5) == (b"", [])


def test_descriptors_do_not_run_into_the_next_message(pair: Pair) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    for payload in (b"one", b"two"):
        send_fds(pair[0], payload, [fd])
    os.close(fd)
    for payload in (b"one", b"two"):
        data, fds = recv_fds(pair[1], 10, 1)
        assert data == payload
        os.close(fds[0])


def test_a_receiver_without_room_for_descriptors_says_so(pair: Pair) -> None:
    code = (
        "import os, resource, socket, sys\n"
        "from kvferry.errors import WireError\n"
        "from kvferry.ipc.fds import recv_fds\n"
        "sock = socket.socket(fileno=int(sys.argv[1]))\n"
        "used = len(os.listdir('/proc/self/fd')) - 1\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir('/proc/self/fd'))) + 2, 4096))\n"
        "try:\n"
        "    recv_fds(sock, 10, 100)\n"
        "except WireError as error:\n"
        "    assert 'ulimit -n' in str(error)\n"
        "    assert len(os.listdir('/proc/self/fd')) - 1 == used\n"
        "else:\n"
        "    sys.exit(3)\n"
    )
    fd = os.open("/dev/null", os.O_RDONLY)
    send_fds(pair[0], b"x", [fd] * 50)
    os.close(fd)
    child = [sys.executable, "-c", code, str(pair[1].fileno())]
    subprocess.run(child, pass_fds=[pair[1].fileno()], check=True, timeout=30)


def test_threads_of_one_process_transfer_both_ways_at_once(pair: Pair) -> None:
    other = socket.socketpair()
    results: list[int] = []

    def work(out: socket.socket, back: socket.socket, first: bool) -> None:
        wrappers = _exported(150)
        for turn in range(2):
            if first == (turn == 0):
                send(out, wrappers, 10)
            else:
                arrived = recv(back, 10)
                results.append(len(arrived))
                _close(arrived)
        _close(wrappers)

    threads = [
        threading.Thread(target=work, args=(pair[0], other[0], True)),
        threading.Thread(target=work, args=(other[1], pair[1], False)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for sock in other:
        sock.close()
    assert results == [150, 150]
