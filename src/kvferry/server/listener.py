"""The server's Unix socket: made for its own user, and taken away at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator

from kvferry.errors import ShareError

_BACKLOG = 1024  # as far as net.core.somaxconn allows
_LOCK_S = 5.0
_LOOK_AGAIN_S = 0.01


class Listener:
    """A listening Unix socket at `path`, mode 0600 (0666 where others may connect: they are checked by uid).

    A socket file that nobody answers at is what a killed server left, and is replaced.

    Raises ShareError where another server answers there, or the path is something else.
    """

    def __init__(self, path: str, *, shared: bool) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _locked(os.path.dirname(os.path.abspath(path))):
                _remove_stale(path)
                # Before bind, so that there is no moment at which others could connect.
                os.fchmod(self.socket.fileno(), 0o666 if shared else 0o600)
                self.socket.bind(path)
                os.chmod(path, 0o666 if shared else 0o600)
                self.socket.listen(_BACKLOG)
                self._inode = os.stat(path).st_ino
            self.socket.setblocking(False)
        except OSError as error:
            self.socket.close()
            raise ShareError(f"cannot listen at {path}: {error}") from error
        except BaseException:
            self.socket.close()
            raise

    def close(self) -> None:
        """Remove the socket's file if it is still ours, and stop listening. Idempotent."""
        if self.socket.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)  # while we still answer there, so that nobody has put a socket in its place
        self.socket.close()


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """One server at a time: between looking at a path and listening at it no other may do the same."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ShareError(f"another process keeps the folder {folder} locked (flock)") from None
                time.sleep(_LOOK_AGAIN_S)
        yield
    finally:
        os.close(fd)


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
