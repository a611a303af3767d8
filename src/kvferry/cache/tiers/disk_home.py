"""The folder on disk that one server owns: what lies where in it, and the lock that keeps a second server out.

PATH/kvferry-1/lock                     held (flock) while a server uses PATH; says its pid
PATH/kvferry-1/writing/XXXXXXXX-N.part  files that are being written
PATH/kvferry-1/NAMESPACE/KEY            whole chunks, by their names in hexadecimal
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import threading
import warnings

from kvferry.cache.tiers.tier import ChunkName
from kvferry.errors import TierError, TierUnavailableError

_LOG = logging.getLogger(__name__)

FOLDER = "kvferry-1"
FOLDER_MODE = 0o700
_LOCK = "lock"
_WRITING = "writing"
_HEX_NAME = re.compile(r"[0-9a-f]{64}")
_PART_NAME = re.compile(r"[0-9a-f]{8}-[0-9]+\.part")


class DiskHome:
    """Names of files below PATH, and the lock on it. Any thread may call it.

    Somebody may delete the folder under a running server, to make room, say: `restore` makes and locks it anew. It does
    not where PATH itself has gone or lies on another file system than before: what was mounted there no longer is, and
    the disk below it was not meant.
    """

    def __init__(self, path: str) -> None:
        self._lock_fd: int | None = None
        self._lock: os.stat_result | None = None  # the file that is held: no other gets its number meanwhile
        self.path = os.path.abspath(path)
        self.folder = os.path.join(self.path, FOLDER)
        self._lock_path = os.path.join(self.folder, _LOCK)
        self.num_swept = 0
        self.num_opened = 0  # how often it was taken: what is in it may be another server's each time
        self._prefix = os.urandom(4).hex()
        self._numbers = itertools.count()
        self._restoring = threading.Lock()
        try:
            self._make_path()
            self._device = os.stat(self.path).st_dev
            self._open()
            self._sweep()
        except OSError as error:
            self.close()
            raise TierUnavailableError(
                f"{self.path} cannot be used for chunks: {error}; give a folder that this user may write to"
            ) from error

    def __del__(self) -> None:
        if self._lock_fd is not None:
            warnings.warn(f"the disk tier on {self.path} was not closed", ResourceWarning, stacklevel=1, source=self)
            self.close()

    def chunk(self, name: ChunkName) -> str:
        """The path of a chunk's file."""
        return os.path.join(self.folder, name.namespace.hex(), name.key.hex())

    def part(self) -> str:
        """The path of a file to be written, different each time."""
        return os.path.join(self.folder, _WRITING, f"{self._prefix}-{next(self._numbers)}.part")

    def publish(self, part: str, name: ChunkName) -> None:
        """Give a file that has been written its chunk's name; what is in its place goes, but for a folder.

        Raises OSError; TierError where a folder is in its place, or a file in that of its namespace.
        """
        path = self.chunk(name)
        try:
            try:
                os.rename(part, path)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another thread was first
                    os.mkdir(os.path.dirname(path), FOLDER_MODE)
                os.rename(part, path)
        except (IsADirectoryError, NotADirectoryError) as error:
            raise TierError(f"{path} cannot be written: {error.strerror}; remove what is there") from error

    def namespaces(self) -> list[bytes]:
        """The namespaces that have a folder. Raises OSError."""
        with os.scandir(self.folder) as entries:
            return [
                bytes.fromhex(entry.name)
                for entry in entries
                if _HEX_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]

    def names(self, namespace: bytes) -> list[ChunkName]:
        """The chunks of which there is something in a namespace, file or not. Raises OSError."""
        with os.scandir(os.path.join(self.folder, namespace.hex())) as entries:
            return [
                ChunkName(namespace, bytes.fromhex(entry.name)) for entry in entries if _HEX_NAME.fullmatch(entry.name)
            ]

    def drop_namespace(self, namespace: bytes) -> None:
        """Remove a namespace's folder, if nothing is in it."""
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(self.folder, namespace.hex()))

    def restore(self) -> None:
        """Make the folder anew, if it has gone. Raises TierUnavailableError where that cannot, or must not, be done."""
        if not self._restoring.acquire(blocking=False):
            raise TierUnavailableError(f"{self.folder} is just being made anew; try again")
        try:
            if os.stat(self.path).st_dev != self._device:
                raise TierUnavailableError(
                    f"{self.path} is on another file system than at the start: mount the one that was there again"
                )
            if self._lock is not None and not self._is_lock(self._lock):
                self._open()
            self._make_folders()
        except OSError as error:
            raise TierUnavailableError(f"{self.folder} has gone, and cannot be made anew: {error}") from error
        finally:
            self._restoring.release()

    def check(self) -> None:
        """Look whether this is still the server's own folder: another one may have come after somebody deleted it.

        Takes it back where that other server has ended. Raises TierUnavailableError where it uses the folder.
        """
        lock = self._lock
        try:
            foreign = lock is not None and not os.path.samestat(os.stat(self._lock_path, follow_symlinks=False), lock)
        except OSError:
            return  # nobody's: what is done next makes it anew, or says what is wrong
        if foreign:
            self.restore()

    def close(self) -> None:
        """Give up the lock; idempotent."""
        fd, self._lock_fd, self._lock = self._lock_fd, None, None
        if fd is not None:
            os.close(fd)

    def _open(self) -> None:
        """Make the folders and take the lock."""
        self._make_folders()
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock = os.fstat(fd)
            if not self._is_lock(lock):
                raise OSError(errno.EAGAIN, "the folder was removed while it was opened", self.folder)
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).strip()
            os.close(fd)
            pid = f"pid {int(holder)}" if holder.isdigit() else "its pid is not known"
            raise TierUnavailableError(
                f"{self.path} is used by another server ({pid}); stop it, or give this one another folder"
            ) from None
        except OSError:
            os.close(fd)
            raise
        self.close()
        self._lock_fd, self._lock = fd, lock
        self.num_opened += 1

    def _make_path(self) -> None:
        """Make PATH where it is missing. Raises OSError."""
        try:
            os.makedirs(self.path, FOLDER_MODE)
        except FileExistsError:
            if not os.path.isdir(self.path):
                raise NotADirectoryError(errno.ENOTDIR, "it is a file, and no folder", self.path) from None
        else:
            _LOG.warning(
                "the disk tier's folder %s was not there, and was made: is its file system mounted?", self.path
            )

    def _make_folders(self) -> None:
        """Make what is not there. A folder that others may write to is not ours: they could forge chunks."""
        for folder in (self.folder, os.path.join(self.folder, _WRITING)):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, FOLDER_MODE)
            status = os.stat(folder, follow_symlinks=False)
            if status.st_mode & 0o022 or os.geteuid() not in (0, status.st_uid):
                raise OSError(errno.EPERM, f"owned by uid {status.st_uid} with mode {status.st_mode:o}", folder)

    def _is_lock(self, lock: os.stat_result) -> bool:
        """Whether the lock file is still this one. Raises OSError."""
        try:
            return os.path.samestat(os.stat(self._lock_path, follow_symlinks=False), lock)
        except FileNotFoundError:
            return False

    def _sweep(self) -> None:
        """Remove what a server that was killed was writing."""
        with os.scandir(os.path.join(self.folder, _WRITING)) as entries:
            parts = [entry.path for entry in entries if _PART_NAME.fullmatch(entry.name)]
        for part in parts:
            os.unlink(part)
            self.num_swept += 1
