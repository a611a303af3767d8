"""The server's Unix socket: made for its own user, and taken away at the end."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from kvferry.errors import ServerGoneError, ShareError


class Listener:
    """A listening Unix socket at `path`, mode 0600 (0666 where others may connect: they are checked by uid).

    A socket file that nobody answers at is what a killed server left, and is replaced.

    Raises ShareError where another server answers there, or the path is something else.
    """

    def __init__(self, path: str, *, shared: bool) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_stale(path)
            # Before bind, so that there is no moment at which others could connect.
            os.fchmod(self.socket.fileno(), 0o666 if shared else 0o600)
            self.socket.bind(path)
            os.chmod(path, 0o666 if shared else 0o600)
            self.socket.listen(128)
            self.socket.setblocking(False)
            self._inode = os.stat(path).st_ino
        except OSError as error:
            self.socket.close()
            raise ShareError(f"cannot listen at {path}: {error}") from error
        except BaseException:
            self.socket.close()
            raise

    def close(self) -> None:
        """Stop listening, and remove the socket's file if it is still ours. Idempotent."""
        if self.socket.fileno() < 0:
            return
        self.socket.close()
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)


def connect(path: str, timeout_s: float) -> socket.socket:
    """A connected socket. Raises ServerGoneError where nobody answers."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise ServerGoneError(f"no server answers at {path}: {error}") from error
    return sock


def _remove_stale(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ShareError(f"{path} is there already and is no socket; choose another path or remove it")
    try:
        connect(path, 1.0).close()
    except ServerGoneError:
        os.unlink(path)
        return
    raise ShareError(f"another server answers at {path}; stop it or choose another path")
