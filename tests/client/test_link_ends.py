"""Link: every job ends, whatever the server, its process, or the reader's thread comes to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from doubles.link_server import Server, until
from kvferry.client.link import Link
from kvferry.client.waiting import Answer
from kvferry.errors import ServerGoneError
from kvferry.protocol.address import UnixAddress
from kvferry.protocol.framing import encode_frame
from kvferry.protocol.messages import Error, Ping, Pong, Welcome

# A server that does what its standard input says. "die" is how a process dies that has long work to do in the kernel:
# its sockets are closed, and it is not gone.
SERVER = """
import ctypes, os, platform, socket, sys, threading, time
listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1]); listener.listen()
print("ready", flush=True)
peer, _ = listener.accept()
peer.sendall(bytes.fromhex(sys.argv[2]))
def rest():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.005)
    peer.close(); listener.close()
    sys.stdin.readline()
    os._exit(0)
order = sys.stdin.readline().strip()
if order == "fork":
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    sys.stdin.readline()
threading.Thread(target=rest).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVER, str(tmp_path / "p"), encode_frame(Welcome(1, b"i" * 16)).hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def say(process: subprocess.Popen[str], order: str) -> None:
    assert process.stdin is not None
    process.stdin.write(order + "\n")
    process.stdin.flush()


def test_jobs_end_when_a_server_that_lives_has_hung_up(server: Server, link: Link) -> None:
    jobs: list[Answer] = []
    link.expect(jobs.append)
    server.hang_up()
    until(jobs)
    assert isinstance(jobs[0], ServerGoneError)
    assert link.close()


def test_jobs_of_a_server_that_is_dying_end_with_its_process(child: subprocess.Popen[str], tmp_path: Path) -> None:
    jobs: list[Answer] = []
    link = Link(UnixAddress(str(tmp_path / "p")), 10)
    link.expect(jobs.append)
    say(child, "die")
    with pytest.raises(ServerGoneError):
        link.call(Ping, Pong, 30)
    assert not link.close(1.0)
    assert jobs == []
    say(child, "now")
    until(jobs)
    assert isinstance(jobs[0], ServerGoneError)
    assert link.close()


def test_jobs_end_with_the_process_though_a_forked_child_holds_the_socket(
    child: subprocess.Popen[str], tmp_path: Path
) -> None:
    jobs: list[Answer] = []
    link = Link(UnixAddress(str(tmp_path / "p")), 10)
    link.expect(jobs.append)
    say(child, "fork")
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    try:
        child.kill()
        until(jobs)
        assert isinstance(jobs[0], ServerGoneError)
        with pytest.raises(ServerGoneError):
            link.call(Ping, Pong, 30)
        assert link.close()
    finally:
        os.kill(grandchild, 9)


def test_the_link_ends_and_all_jobs_fail_when_taking_in_an_answer_fails(server: Server, link: Link) -> None:
    jobs: list[Answer] = []

    def fail(answer: Answer) -> None:
        jobs.append(answer)
        raise RuntimeError("a mistake of ours")

    first = link.expect(fail)
    link.expect(jobs.append)
    link.expect(fail)
    link.expect(jobs.append)
    assert server.peer is not None
    server.peer.sendall(encode_frame(Error(first, "busy", "later")))
    deadline = time.monotonic() + 20
    while link.usable and time.monotonic() < deadline:
        time.sleep(0.002)
    with pytest.raises(ServerGoneError, match="a mistake of ours"):
        link.call(Ping, Pong, 30)
    server.hang_up()
    until(jobs, 5)
    assert [type(answer) for answer in jobs] == [Error, *[ServerGoneError] * 4]
    assert link.close()


def test_clients_leave_no_hooks_for_forked_children(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "register_at_fork", lambda **hook: hooks.append(hook))
        for _ in range(3):
            thread = server.greet(Welcome(1, b"i" * 16))
            Link(UnixAddress(str(tmp_path / "s")), 10).close(0.0)
            thread.join()
            server.hang_up()
    assert len(hooks) <= 1
