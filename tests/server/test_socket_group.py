"""A socket that is given to a group: its members may connect, each uid as a tenant of its own."""

from __future__ import annotations

import contextlib
import grp
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.errors import ShareError
from kvferry.server import CacheServer, ServerConfig
from kvferry.server.net.listener import UnixListener, group_id_of

GROUP, STRANGER = 54_321, 65_534

# Becomes another user, connects, says hello by protocol 1, prints what comes.
CONNECT = """
import os, socket, sys
path, uid, *groups = sys.argv[1:]
sock = socket.socket(socket.AF_UNIX)
os.setgroups([int(group) for group in groups])
os.setgid(int(uid))
os.setuid(int(uid))
try:
    sock.connect(path)
    body = bytes.fromhex("83a474797065a568656c6c6fa776657273696f6e01a66f6c6465737401")
    sock.settimeout(10)
    try:
        sock.sendall(len(body).to_bytes(4, "little") + body)
    except BrokenPipeError:
        pass  # it is refused before it says anything
    print(sock.recv(4096))
except OSError as error:
    print(error)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def connect_as(path: Path, uid: int, groups: list[int]) -> str:
    """What another user gets."""
    command = [sys.executable, "-I", "-S", "-c", CONNECT, str(path), str(uid), *map(str, groups)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def mode_and_group(path: Path) -> tuple[int, int]:
    status = path.stat()
    return stat.S_IMODE(status.st_mode), status.st_gid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_members_are_served_and_others_are_not(open_folder: Path) -> None:
    path = open_folder / "s"
    config = ServerConfig(socket_path=str(path), socket_group=str(GROUP), memory_bytes=1 << 20, device="cpu")
    with CacheServer(config) as server:
        assert mode_and_group(path) == (0o660, GROUP)
        assert "welcome" in connect_as(path, STRANGER, [GROUP])
        assert "Permission denied" in connect_as(path, STRANGER, [])
        os.chmod(path, 0o666)  # the mode is not all that keeps them out
        text = connect_as(path, STRANGER, [GROUP + 1])
        assert f"uid {STRANGER}" in text
        assert f"group {GROUP}" in text
        assert "welcome" in connect_as(path, GROUP, [])  # by its main group
        assert server._parts.state.refusals.values()["sessions_refused_uid"] == 1


def test_a_group_of_our_own(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = UnixListener(str(path), group_id=os.getegid())
    assert mode_and_group(path) == (0o660, os.getegid())
    listener.close()
    both = UnixListener(str(path), shared=True, group_id=os.getegid())
    assert mode_and_group(path) == (0o666, os.getegid())
    both.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may give anything to anybody")
def test_a_group_that_is_not_ours_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ShareError, match=f"group {GROUP}"):
        UnixListener(str(tmp_path / "s"), group_id=GROUP)
    assert not (tmp_path / "s").exists()


def test_groups_by_name_and_number() -> None:
    entry = grp.getgrgid(0)
    assert group_id_of(entry.gr_name) == group_id_of("0") == 0
    assert group_id_of(None) is None
    with pytest.raises(ShareError, match="no group 'none of that name'"):
        group_id_of("none of that name")


# Becomes another user, and tries to connect as a client does; prints the error.
ASK = """
import os, sys
from kvferry.client.handshake import connect
from kvferry.errors import ServerGoneError
from kvferry.protocol.address import UnixAddress
path, uid = sys.argv[1:]
os.setgroups([])
os.setgid(int(uid))
os.setuid(int(uid))
try:
    connect(UnixAddress(path), 5)
except ServerGoneError as error:
    print(error)
"""


def ask_as_stranger(path: Path) -> str:
    command = [sys.executable, "-c", ASK, str(path), str(STRANGER)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_who_may_not_open_the_socket_hears_why(open_folder: Path) -> None:
    path = open_folder / "kvferry.sock"
    with contextlib.closing(UnixListener(str(path))):
        said = ask_as_stranger(path)
        open_folder.chmod(0o700)
        outside = ask_as_stranger(path)
    assert f"uid {STRANGER} may not open the socket {path} (owner: uid 0, group 0, mode 600)" in said
    assert f"--allow-uid {STRANGER} or --socket-group" in said
    assert "[Errno 13]" in said
    assert f"uid {STRANGER} may not enter its folder" in outside
