"""Where the server listens: a Unix socket made for its own user and taken away at the end, and a TCP socket."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator

from kvferry.config import ServerConfig
from kvferry.errors import ShareError
from kvferry.protocol.address import Address, TcpAddress, UnixAddress
from kvferry.settings import is_loopback

_LOG = logging.getLogger(__name__)

_BACKLOG = 1024  # as far as net.core.somaxconn allows
_LOCK_S = 5.0
_LOOK_AGAIN_S = 0.01


class UnixListener:
    """A listening Unix socket at `path`, mode 0600.

    It is 0660 where it is given to a group, 0666 where other uids may connect; who connects is checked in any case. A
    socket file that nobody answers at is what a killed server left, and is replaced.

    Raises ShareError where another server answers there, or the path is something else.
    """

    def __init__(self, path: str, *, shared: bool = False, group_id: int | None = None) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._inode: int | None = None
        try:
            with _locked(f"{path}.lock"):
                _remove_stale(path)
                os.fchmod(self.socket.fileno(), 0o600)  # before bind: there is no moment at which others could connect
                self.socket.bind(path)
                self._inode = os.stat(path).st_ino
                if group_id is not None:
                    _give_to_group(path, group_id)
                os.chmod(path, 0o666 if shared else 0o600 if group_id is None else 0o660)
                self.socket.listen(_BACKLOG)
            self.socket.setblocking(False)
        except OSError as error:
            self.close()
            raise ShareError(f"cannot listen at {path}: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> Address:
        return UnixAddress(self.path)

    def close(self) -> None:
        """Remove the socket's file if it is still ours, and stop listening. Idempotent."""
        if self.socket.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)  # while we still answer there, so that nobody has put a socket in its place
        self.socket.close()


class TcpListener:
    """A listening TCP socket at the first address that the host's name stands for; `address` has the real port.

    Raises ShareError where it cannot be had.
    """

    def __init__(self, address: TcpAddress) -> None:
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self.socket = socket.socket(family, kind, protocol)
        except OSError as error:
            raise ShareError(f"cannot listen at {address}: {error}") from error
        try:
            self.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # what old connections left is no hindrance
            self.socket.bind(place)
            self.socket.listen(_BACKLOG)
            self.socket.setblocking(False)
            host, port = self.socket.getsockname()[:2]
        except OSError as error:
            self.socket.close()
            raise ShareError(
                f"cannot listen at {address}: {error}; choose another port, or 0 for any that is free"
            ) from error
        self.address: Address = TcpAddress(host, port)
        if not is_loopback(host):
            _LOG.warning(
                "%s can be reached from other machines: who may connect is checked, but nothing is encrypted",
                self.address,
            )

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self.socket.close()


Listener = UnixListener | TcpListener


def make_listeners(config: ServerConfig, undo: contextlib.ExitStack) -> tuple[Listener, ...]:
    """What the configuration asks for, listening until `undo` closes it. Raises ShareError."""
    shared, group_id = bool(config.allow_uids), group_id_of(config.socket_group)
    made: list[Listener] = [UnixListener(config.socket_path, shared=shared, group_id=group_id)]
    undo.callback(made[0].close)
    if config.listen is not None:
        made.append(TcpListener(TcpAddress.parse(config.listen)))
        undo.callback(made[1].close)
    return tuple(made)


def group_id_of(name: str | None) -> int | None:
    """The number of a group that is given by name or number. Raises ShareError where there is none of that name."""
    if name is None or name.isdigit():
        return None if name is None else int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ShareError(f"there is no group {name!r} to give the socket to; see `getent group`") from None


def _give_to_group(path: str, group_id: int) -> None:
    try:
        os.chown(path, -1, group_id)
    except PermissionError:
        raise ShareError(
            f"the socket {path} cannot be given to group {group_id}: uid {os.geteuid()} is no member of it"
        ) from None


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """One server at a time: between looking at a path and listening at it no other may do the same.

    The lock is a file of our own, which nobody else can open: a folder may be locked by all who can read it.
    """
    fd = _lock(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)  # while it is ours; who waits for it sees that it is gone, and makes another
        os.close(fd)


def _lock(path: str) -> int:
    deadline = time.monotonic() + _LOCK_S
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                raise ShareError(f"{path} is no lock file of uid {os.geteuid()}; remove it or choose another path")
            if _is_locked(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if time.monotonic() > deadline:
            raise ShareError(f"another process of uid {os.geteuid()} keeps {path} locked (flock)")
        time.sleep(_LOOK_AGAIN_S)


def _is_locked(fd: int, path: str) -> bool:
    """Whether we have the lock now, of the file that is still there."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove_stale(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ShareError(f"{path} is there already and is no socket; choose another path or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # its queue is full: it listens, however slow it is
    raise ShareError(f"another server answers at {path}; stop it or choose another path")
