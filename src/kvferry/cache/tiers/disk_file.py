"""One file whole: a header's page and a chunk's bytes, past the page cache (O_DIRECT) or through it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.cache.tiers.format import HEADER_BYTES
from kvferry.errors import ChunkCorruptError

PAGE_BYTES = 4096
"""What O_DIRECT asks of addresses, offsets and lengths; 512 would do on many disks, this does on all."""

DIRECT_MIN_BYTES = 1 << 20
"""Below this a device waits for each file longer than the copy through the page cache takes."""

FILE_MODE = 0o600
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: a pipe in a file's place must not hang the open


def suits_direct(data: memoryview) -> bool:
    """Whether O_DIRECT can take the bytes from where they lie, or put them there, and is worth it."""
    return len(data) >= DIRECT_MIN_BYTES and np.frombuffer(data, np.uint8).ctypes.data % PAGE_BYTES == 0


def write_file(path: str, header: bytes, data: memoryview, *, direct: bool) -> None:
    """Make a file of `header` and `data`. Raises OSError; what there then is of the file, the caller removes."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS | (os.O_DIRECT if direct else 0), FILE_MODE)
    try:
        parts = _Parts(data)
        parts.header[:] = header
        parts.tail[: parts.tail_bytes] = data[parts.whole_bytes :]
        done = _transfer(os.pwritev, fd, parts.views())
        length = HEADER_BYTES + len(data)
        if done < length:
            raise OSError(errno.EIO, f"only {done} of {length} bytes could be written")
        if done > length:
            os.truncate(fd, length)
    finally:
        os.close(fd)


def read_file(path: str, into: memoryview, *, direct: bool) -> bytes:
    """Fill `into` with what follows the header, which is returned; marks the file as just used.

    Raises OSError; ChunkCorruptError where it is no file, or not one of `into`'s length.
    """
    fd = os.open(path, os.O_RDONLY | _FLAGS | (os.O_DIRECT if direct else 0))
    try:
        check_length(fd, HEADER_BYTES + len(into))
        parts = _Parts(into)
        done = _transfer(os.preadv, fd, parts.views())
        if done < HEADER_BYTES + len(into):
            raise ChunkCorruptError(f"it ended after {done} bytes while it was read: somebody cuts it off")
        into[parts.whole_bytes :] = parts.tail[: parts.tail_bytes]
        mark_used(fd)
        return bytes(parts.header)
    finally:
        os.close(fd)


def read_header(path: str) -> tuple[bytes, os.stat_result]:
    """A file's first page, and its length and times. Raises OSError; ChunkCorruptError where it is no file."""
    fd = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        status = check_length(fd, None)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # else the kernel reads ahead what nobody wants
        return os.pread(fd, HEADER_BYTES, 0), status
    finally:
        os.close(fd)


def check_length(fd: int, expected: int | None) -> os.stat_result:
    """Raise ChunkCorruptError unless `fd` is a regular file, of `expected` bytes where that is given."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ChunkCorruptError("it is no regular file")
    if expected is not None and status.st_size != expected:
        raise ChunkCorruptError(f"it has {status.st_size} bytes instead of {expected}")
    return status


def mark_used(fd: int) -> None:
    """Set a file's times to now: its order among the others is what is left of its last use after a restart."""
    with contextlib.suppress(OSError):  # a read-only mount: the order is then that of the writes
        os.utime(fd)


class _Parts:
    """A file's content as pages: the header and the tail in pages of their own, between them the caller's memory."""

    def __init__(self, data: memoryview) -> None:
        self.tail_bytes = len(data) % PAGE_BYTES
        self.whole_bytes = len(data) - self.tail_bytes
        edges = memoryview(mmap.mmap(-1, HEADER_BYTES + PAGE_BYTES))
        self.header = edges[:HEADER_BYTES]
        self.tail = edges[HEADER_BYTES:]
        self._whole = data[: self.whole_bytes]

    def views(self) -> list[memoryview]:
        """All of it, in the file's order; a tail that holds something is written as a whole page."""
        parts = [self.header, self._whole, self.tail if self.tail_bytes else self.tail[:0]]
        return [part for part in parts if len(part)]


def _transfer(move: Callable[[int, Sequence[memoryview], int], int], fd: int, views: list[memoryview]) -> int:
    """Move all of `views` from or to the file's beginning on; how many bytes it were, fewer only at its end."""
    done = 0
    while views:
        count = move(fd, views, done)
        if count == 0:
            break
        done += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
    return done
