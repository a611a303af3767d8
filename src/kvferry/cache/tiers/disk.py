"""The disk tier: a file a chunk, below one folder, found again after a restart."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvferry.cache.tiers import disk_file, format
from kvferry.cache.tiers.disk_home import DiskHome
from kvferry.cache.tiers.tier import ChunkMeta, ChunkName
from kvferry.errors import ChunkCorruptError, ChunkMissingError, TierError, TierFullError, TierUnavailableError

_LOG = logging.getLogger(__name__)

DISK_THREADS = 4

_SCAN_BATCH = 512
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_GONE = {errno.ENOENT, errno.ESTALE}
_NO_FILE = {errno.ELOOP, errno.ENXIO}  # a link, a socket
_FILE_FAULTS = {errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO}


class StoredChunk(NamedTuple):
    """A chunk that was found on disk, and when it was last written or read."""

    meta: ChunkMeta
    mtime_ns: int


class DiskTier:
    """Keeps each chunk in a file of its own below `path`, which one server uses at a time.

    A file gets its name once it is whole. It is not synced: after a loss of power it may be torn, which its checksums
    show, and is then a miss. Chunks of 1 MiB or more go past the page cache where their memory is page-aligned and the
    file system can (`direct`): the device is as fast, a byte costs a quarter of the CPU time, and memory is not filled
    with second copies. A call takes as long as the disk does; a disk that hangs, hangs its thread.

    Raises TierUnavailableError where the folder cannot be used, or another server does.
    """

    name = "disk"
    num_threads = DISK_THREADS

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._home = DiskHome(os.fspath(path))
        self.direct = True
        self.num_torn = self._home.num_swept
        self.num_unlisted = 0

    @property
    def num_opened(self) -> int:
        """How often the folder was taken: more than once where somebody deleted it, and another server came between."""
        return self._home.num_opened

    def __repr__(self) -> str:
        return f"<DiskTier {self._home.path}{'' if self.direct else ', buffered'}>"

    def write(self, meta: ChunkMeta, data: memoryview, digest: bytes = b"") -> None:
        """Keep a chunk, whole or not at all; `digest` is the checksum of what `data` ought to be, where that is known.

        Raises TierFullError, TierUnavailableError, or another TierError where only this chunk cannot be kept.
        """
        if len(data) != meta.nbytes:
            raise ValueError(f"{len(data)} bytes for {format.describe(meta)}")
        header = format.encode(meta, digest or format.digest_of(data))
        self._home.check()
        try:
            try:
                self._write(meta.name, header, data)
            except FileNotFoundError:
                self._home.restore()
                self._write(meta.name, header, data)
        except OSError as error:
            kind = TierFullError if error.errno in _FULL else TierUnavailableError
            raise kind(f"{format.describe(meta)} was not written below {self._home.path}: {error.strerror}") from error

    def read(self, meta: ChunkMeta, into: memoryview) -> bytes:
        """Fill `into` with a chunk's bytes; their checksum.

        Raises ChunkMissingError, ChunkCorruptError or TierUnavailableError.
        """
        if len(into) != meta.nbytes:
            raise ValueError(f"{len(into)} bytes of memory for {format.describe(meta)}")
        path = self._home.chunk(meta.name)
        self._home.check()
        try:
            header = format.decode(self._read(path, into))
            format.check(header, meta, into)
        except ChunkCorruptError as error:
            raise ChunkCorruptError(f"{path} is not {format.describe(meta)}: {error}") from None
        except OSError as error:
            raise _read_error(error, path) from error
        return header.digest

    def find(self, names: Sequence[ChunkName]) -> int:
        """How many of `names`, from the first on, have files."""
        self._home.check()
        for count, name in enumerate(names):
            try:
                if not stat.S_ISREG(os.stat(self._home.chunk(name), follow_symlinks=False).st_mode):
                    return count
            except (FileNotFoundError, NotADirectoryError):
                return count
            except OSError as error:
                raise TierUnavailableError(f"{self._home.path} cannot be searched: {error}") from error
        return len(names)

    def delete(self, names: Sequence[ChunkName]) -> None:
        """Remove chunks' files; one that cannot be removed does not keep the others."""
        self._home.check()
        failed: OSError | None = None
        for name in names:
            try:
                os.unlink(self._home.chunk(name))
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                continue  # what is no file is no chunk, and never taken for one
            except OSError as error:
                failed = error
        if failed is not None:
            raise TierUnavailableError(f"a chunk cannot be deleted: {failed}") from failed

    def scan(self) -> Iterator[Sequence[StoredChunk]]:
        """All chunks on disk, parents before children, in batches; some are empty, so that the caller gets its turn.

        Removes what is no whole chunk, and counts it in `num_torn` (a folder is counted, and stays); does not read the
        chunks' bytes. Meant to run before the first write: of two files with one name, a new one might be removed for
        an old one that was torn.
        A namespace that cannot be listed is left out, and counted in `num_unlisted`.

        Raises TierUnavailableError where the folder itself cannot be listed.
        """
        self._home.check()
        try:
            namespaces = self._home.namespaces()
        except OSError as error:
            raise TierUnavailableError(f"{self._home.path} cannot be listed: {error}") from error
        self.num_unlisted = 0
        for namespace in namespaces:
            try:
                names = self._home.names(namespace)
            except OSError as error:
                if not self.num_unlisted:
                    _LOG.error("chunks below %s are left out, as they cannot be listed: %s", self._home.path, error)
                self.num_unlisted += 1
                yield ()
            else:
                yield from self._scan_namespace(namespace, names)
        if self.num_unlisted:
            _LOG.error("%d of %d folders below %s were left out", self.num_unlisted, len(namespaces), self._home.path)

    def free_bytes(self) -> int:
        """What the file system has left for this user, nothing where it has no inodes. Raises TierUnavailableError."""
        self._home.check()
        try:
            status = os.statvfs(self._home.path)
        except OSError as error:
            raise TierUnavailableError(f"the free space of {self._home.path} cannot be asked for: {error}") from error
        out_of_inodes = status.f_files and not status.f_favail  # some file systems do not count them
        return 0 if out_of_inodes else status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Let another server have the folder; idempotent."""
        self._home.close()

    def _write(self, name: ChunkName, header: bytes, data: memoryview) -> None:
        """Write a file and publish it, or leave nothing. Raises OSError."""
        direct = self.direct and disk_file.suits_direct(data)
        part = self._home.part()
        try:
            try:
                disk_file.write_file(part, header, data, direct=direct)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part)
                disk_file.write_file(part, header, data, direct=False)
                self._fall_back()
            self._home.publish(part, name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise

    def _read(self, path: str, into: memoryview) -> bytes:
        """Fill `into`; the header. Raises OSError or ChunkCorruptError."""
        direct = self.direct and disk_file.suits_direct(into)
        try:
            return disk_file.read_file(path, into, direct=direct)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
        header = disk_file.read_file(path, into, direct=False)
        self._fall_back()
        return header

    def _fall_back(self) -> None:
        """Go through the page cache from now on; a thread that is a moment late does so once more."""
        if self.direct:
            self.direct = False
            _LOG.info("the file system of %s takes no O_DIRECT; chunks go through the page cache", self._home.path)

    def _scan_namespace(self, namespace: bytes, names: Sequence[ChunkName]) -> Iterator[Sequence[StoredChunk]]:
        found: list[StoredChunk] = []
        if not names:
            self._home.drop_namespace(namespace)
        for number, name in enumerate(names, 1):
            chunk = self._inspect(name)
            if chunk is not None:
                found.append(chunk)
            if number % _SCAN_BATCH == 0:
                yield ()
        found.sort(key=lambda chunk: chunk.meta.depth)
        for first in range(0, len(found), _SCAN_BATCH):
            yield found[first : first + _SCAN_BATCH]

    def _inspect(self, name: ChunkName) -> StoredChunk | None:
        """What a file's header says; what is no whole chunk is removed, a folder or what cannot be read is left."""
        path = self._home.chunk(name)
        try:
            page, status = disk_file.read_header(path)
            meta = format.decode(page).meta
            if meta.name == name and status.st_size == format.HEADER_BYTES + meta.nbytes:
                return StoredChunk(meta, status.st_mtime_ns)
        except ChunkCorruptError:
            pass
        except OSError as error:
            if error.errno not in _NO_FILE:
                _LOG.warning("%s is left out: %s", path, error)
                return None
        self.num_torn += 1
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None


def _read_error(error: OSError, path: str) -> TierError:
    """Whether an error speaks of one file, which is then forgotten, or of the disk."""
    if error.errno in _GONE:
        return ChunkMissingError(f"{path} is not there (any more)")
    if error.errno in _FILE_FAULTS:
        return ChunkCorruptError(f"{path} cannot be read: {error.strerror}")
    return TierUnavailableError(f"{path} cannot be read: {error.strerror}")
