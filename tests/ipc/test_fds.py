"""Passing wrappers and file descriptors over a Unix socket: bounds, time-outs, and peers that misbehave or die."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from doubles.host_files import close_all, count_fds, exported_rows
from kvferry.ipc.fds import BATCH_FDS, recv, recv_fds, send, send_fds

Pair = tuple[socket.socket, socket.socket]


def _frame(kind: bytes, number: int) -> bytes:
    return struct.pack("<4ssI", b"KVF1", kind, number)


@pytest.mark.parametrize("number", [0, 1, BATCH_FDS, BATCH_FDS + 1, 300])
def test_wrappers_arrive_in_order_and_no_descriptor_is_left(pair: Pair, pool: ThreadPoolExecutor, number: int) -> None:
    wrappers = exported_rows(number)
    before = count_fds()
    sending = pool.submit(send, pair[0], wrappers, 5)
    arrived = recv(pair[1], 5)
    sending.result(5)
    assert count_fds() == before
    assert arrived == wrappers
    assert [int(w.to_tensor()[0]) for w in arrived] == list(range(number))
    close_all(arrived + wrappers)


def test_several_transfers_go_over_one_socket_and_its_time_out_stays(pair: Pair, pool: ThreadPoolExecutor) -> None:
    pair[0].settimeout(None)
    pair[1].settimeout(3.5)
    for number in (2, 3):
        wrappers = exported_rows(number)
        sending = pool.submit(send, pair[0], wrappers)
        arrived = recv(pair[1])
        sending.result(5)
        assert len(arrived) == number
        close_all(arrived + wrappers)
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
        "sock = socket.socket(fileno=os.dup(int(sys.argv[1])))\n"  # with no free numbers below it
        "os.close(int(sys.argv[1]))\n"
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
        wrappers = exported_rows(150)
        for turn in range(2):
            if first == (turn == 0):
                send(out, wrappers, 10)
            else:
                arrived = recv(back, 10)
                results.append(len(arrived))
                close_all(arrived)
        close_all(wrappers)

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
