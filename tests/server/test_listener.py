"""Where a server listens: stale files, other servers, folders; and the memory that it may have."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.client.handshake import connect
from kvferry.config import ServerConfig
from kvferry.errors import ServerGoneError, ShareError
from kvferry.protocol.address import UnixAddress
from kvferry.server import CacheServer
from kvferry.server.limits import check_memory
from kvferry.server.net import listener as listener_module
from kvferry.server.net.listener import UnixListener


def stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def test_a_stale_file_is_replaced_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    stale(path)
    listener = UnixListener(str(path), shared=False)
    connect(UnixAddress(str(path)), 1).close()
    listener.close()
    listener.close()
    assert not path.exists()


def test_a_second_server_leaves_the_first_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = UnixListener(str(path), shared=False)
    with pytest.raises(ShareError, match="another server answers"):
        UnixListener(str(path), shared=False)
    connect(UnixAddress(str(path)), 1).close()
    first.close()


def test_a_server_too_busy_to_accept_is_not_stale(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(path)
        busy.listen(0)
        waiting = connect(UnixAddress(path), 1)
        with pytest.raises(ServerGoneError):
            connect(UnixAddress(path), 0.05)
        with pytest.raises(ShareError, match="another server answers"):
            UnixListener(path, shared=False)
        found: list[socket.socket] = []
        thread = threading.Thread(target=lambda: found.append(connect(UnixAddress(path), 5)))
        thread.start()
        busy.accept()[0].close()  # now there is room for one more
        thread.join()
        for sock in (waiting, *found):
            sock.close()
        assert len(found) == 1


def test_of_servers_that_start_together_one_wins(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    for _ in range(30):
        stale(Path(path))
        made: list[UnixListener] = []
        refused: list[ShareError] = []

        def start(made: list[UnixListener] = made, refused: list[ShareError] = refused) -> None:
            try:
                made.append(UnixListener(path, shared=False))
            except ShareError as error:
                refused.append(error)

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1, (made, refused)
        connect(UnixAddress(path), 1).close()
        made[0].close()
        assert not os.path.exists(path)


def test_a_closing_server_leaves_its_successors_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = UnixListener(str(path), shared=False)
    path.rename(tmp_path / "moved")
    second = UnixListener(str(path), shared=False)
    first.close()
    connect(UnixAddress(str(path)), 1).close()
    second.close()


def _file(path: Path) -> str:
    path.write_text("x")
    return str(path)


def _no_folder(path: Path) -> str:
    return str(path / "none" / "s")


@pytest.mark.parametrize(("make", "words"), [(_file, "is no socket"), (_no_folder, "No such file")])
def test_places_that_cannot_be_had(tmp_path: Path, make: Callable[[Path], str], words: str) -> None:
    with pytest.raises(ShareError, match=words):
        CacheServer(ServerConfig(socket_path=make(tmp_path / "s"), memory_bytes=1 << 20, device="cpu")).start()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ShareError, match="cannot listen"):
        UnixListener(str(tmp_path / "s"), shared=False)


def test_a_path_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="107"):
        ServerConfig(socket_path="/" + "x" * 107)


def test_more_memory_than_the_machine_has_is_refused_by_name(tmp_path: Path) -> None:
    server = CacheServer(ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=1 << 50, device="cpu"))
    with pytest.raises(ShareError, match="MemAvailable"):
        server.start()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("groups", "file", "limited"),
    [
        ("0::/a/b\n", "sys/fs/cgroup/a/memory.max", True),
        ("0::/a/b\n", "sys/fs/cgroup/memory.max", True),
        ("0::/\n", "sys/fs/cgroup/memory.max", True),
        ("3:cpu:/x\n5:memory,pids:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes", True),
        ("0::/a/b\n", "sys/fs/cgroup/other/memory.max", False),
    ],
)
def test_a_control_groups_limit_is_named(tmp_path: Path, groups: str, file: str, limited: bool) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("1048576\n")
    check_memory(1 << 20, tmp_path)
    if limited:
        with pytest.raises(ShareError, match=file):
            check_memory((1 << 20) + 1, tmp_path)
    else:
        check_memory(1 << 40, tmp_path)
    (tmp_path / file).write_text("max\n")
    check_memory(1 << 40, tmp_path)


def test_a_server_whose_loop_breaks_ends_with_an_error(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from kvferry.errors import KVFerryError\n"
        "from kvferry.server import CacheServer, ServerConfig\n"
        "server = CacheServer(ServerConfig(socket_path=sys.argv[1], memory_bytes=1 << 20, device='cpu'))\n"
        "server._on_tick = server._loop._on_tick = lambda now: 1 / 0\n"
        "try:\n"
        "    server.serve_forever()\n"
        "except KVFerryError as error:\n"
        "    sys.exit(3 if 'ZeroDivisionError' in str(error) else 4)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")], timeout=40, check=False, capture_output=True
    )
    assert done.returncode == 3
    assert not (tmp_path / "s").exists()


def test_who_may_read_the_folder_cannot_keep_a_server_from_starting(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        UnixListener(str(tmp_path / "s")).close()
    finally:
        os.close(folder)
    assert not list(tmp_path.iterdir())


def test_the_lock_is_a_file_of_our_own(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("of somebody")
    lock = tmp_path / "s.lock"
    lock.symlink_to(target)
    with pytest.raises(ShareError, match=r"s\.lock"):
        UnixListener(str(tmp_path / "s"))
    assert target.read_text() == "of somebody"
    lock.unlink()
    os.mkfifo(lock, 0o600)
    with pytest.raises(ShareError, match=r"s\.lock is no lock file of uid"):
        UnixListener(str(tmp_path / "s"))
    lock.unlink()
    lock.touch(0o600)  # of a server that was killed there
    UnixListener(str(tmp_path / "s")).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]


def test_a_lock_that_is_held_is_waited_for_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_LOCK_S", 0.1)
    with open(tmp_path / "s.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ShareError, match=r"keeps .*s\.lock locked"):
            UnixListener(str(tmp_path / "s"))
