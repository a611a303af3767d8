"""The remote tier: an object a chunk, in a bucket (`s3://`) or in a folder that hosts share (`file://`), by obstore."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from kvferry.cache.tiers import format
from kvferry.cache.tiers.remote_parts import Parts
from kvferry.cache.tiers.remote_store import RemoteUrl, open_store, unavailable
from kvferry.cache.tiers.tier import ChunkMeta, ChunkName
from kvferry.errors import ChunkCorruptError, ChunkMissingError, TierUnavailableError

FOLDER = "kvferry-1"
REMOTE_THREADS = 8
"""Calls at one time. Each mostly waits for an answer, so there are more of them than cores would do."""

_PIECE_BYTES = 1 << 20  # what is copied at a time with the interpreter's lock held
_PAGE = 1000  # objects
_PAGES_S = 600.0  # for all pages of a namespace

_NO_BUCKET = "<Code>NoSuchBucket</Code>"
_OBJECT = re.compile(FOLDER + r"/[0-9a-f]{64}/[0-9a-f]{64}")

_T = TypeVar("_T")


class RemoteTier:
    """Keeps chunks where other hosts find them, too, under `<url>/kvferry-1/<namespace>/<key>`.

    An object appears once it is whole; in a folder it is written elsewhere in it before. A call that gets no answer
    fails after about `timeout_s` in all, its few retries included (`file://` is as fast as its mount). No text says
    more of `options`, or of a server's answer, than names, codes and the URL: credentials are in them.

    Parameters
    ----------
    options
        The store's settings as obstore names them (`endpoint`, `region`, `access_key_id`, `secret_access_key`, ...);
        what is not there is taken from the usual environment variables.

    Raises TierError for a URL or options that cannot be used, or where obstore is not installed.
    """

    name = "remote"
    num_threads = REMOTE_THREADS

    def __init__(self, url: str, *, options: Mapping[str, str] | None = None, timeout_s: float = 10.0) -> None:
        self._url = RemoteUrl.parse(url)
        self._timeout_s = timeout_s
        self.call_s = 2 * timeout_s  # what a call may take, or a page of one
        self._store, self._error = open_store(self._url, options or {}, timeout_s)
        self._parts = Parts(f"/{self._url.prefix}", f"{FOLDER}/writing") if self._url.scheme == "file" else None

    def __repr__(self) -> str:
        return f"<RemoteTier {self._url}>"

    def write(self, meta: ChunkMeta, data: memoryview, digest: bytes = b"") -> None:
        """Put a chunk's object; `digest` is the checksum of what `data` ought to be, where that is known.

        Raises TierFullError or TierUnavailableError.
        """
        if len(data) != meta.nbytes:
            raise ValueError(f"{len(data)} bytes for {format.describe(meta)}")
        body = np.empty(format.HEADER_BYTES + len(data), np.uint8)
        header = format.encode(meta, digest or format.digest_of(data))
        body[: format.HEADER_BYTES] = np.frombuffer(header, np.uint8)
        body[format.HEADER_BYTES :] = np.frombuffer(data, np.uint8)
        path = _path(meta.name)
        try:
            self._ask(f"PUT {path}", lambda: self._put(path, body.data))
        except FileNotFoundError:
            raise TierUnavailableError(f"PUT {path} failed: {self._url} has gone") from None

    def read(self, meta: ChunkMeta, into: memoryview) -> bytes:
        """Fill `into` with a chunk's bytes; their checksum.

        Raises ChunkMissingError, ChunkCorruptError or TierUnavailableError.
        """
        if len(into) != meta.nbytes:
            raise ValueError(f"{len(into)} bytes of memory for {format.describe(meta)}")
        path = _path(meta.name)
        data = bytearray(format.HEADER_BYTES)
        try:
            self._ask(f"GET {path}", lambda: self._receive(path, [memoryview(data), into]))
            header = format.decode(data)
            format.check(header, meta, into)
        except FileNotFoundError:
            raise ChunkMissingError(f"{self._url} has no {path} (any more)") from None
        except ChunkCorruptError as error:
            raise ChunkCorruptError(f"{path} of {self._url} is not {format.describe(meta)}: {error}") from None
        return header.digest

    def find(self, names: Sequence[ChunkName]) -> int:
        """How many of `names` are there, by halves: few requests, for a chain that has no gap.

        A chain with one (somebody deleted an object from its middle) may be taken for longer than it is; `read` then
        misses the chunk. Raises TierUnavailableError.
        """
        if not names or not self._has(names[0]):
            return 0
        deadline = time.monotonic() + self._timeout_s
        present, most = 1, len(names)
        probe = most
        while present < most:
            if time.monotonic() > deadline:
                raise TierUnavailableError(f"{self._url} did not say within {self._timeout_s} s what it has")
            if self._has(names[probe - 1]):
                present = probe
            else:
                most = probe - 1
            probe = (present + most + 1) // 2
        return present

    def delete(self, names: Sequence[ChunkName]) -> None:
        """Delete chunks' objects. Raises TierUnavailableError."""
        self._delete([_path(name) for name in names])

    def delete_namespace(self, namespace: bytes, on_page: Callable[[], None] = lambda: None) -> None:
        """Delete all objects of a namespace. Raises TierUnavailableError; some may be deleted then.

        `on_page` is called whenever some have been listed or deleted; what it raises ends this.
        """
        for page in self._pages(namespace, on_page):
            self._delete([path for path, _ in page])
            on_page()

    def namespace_bytes(self, namespace: bytes, on_page: Callable[[], None] = lambda: None) -> int:
        """How many bytes all objects of a namespace have. Raises as `delete_namespace` does."""
        return sum(nbytes for page in self._pages(namespace, on_page) for _, nbytes in page)

    def close(self) -> None:
        """There is nothing to give back: connections end with the object."""

    def _put(self, path: str, data: memoryview) -> None:
        """Write an object, whole or not at all."""
        part = path if self._parts is None else self._parts.next()
        self._store.put(part, data, use_multipart=False)
        if part != path:
            try:
                self._store.rename(part, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._store.delete(part)
                raise

    def _has(self, name: ChunkName) -> bool:
        path = _path(name)
        try:
            self._ask(f"HEAD {path}", lambda: self._store.head(path))
        except FileNotFoundError:
            return False
        return True

    def _pages(self, namespace: bytes, on_page: Callable[[], None]) -> Iterator[list[tuple[str, int]]]:
        """The paths and sizes of a namespace's objects, some at a time."""
        deadline = time.monotonic() + _PAGES_S
        prefix = f"{FOLDER}/{namespace.hex()}"
        listing = self._ask(f"LIST {prefix}", lambda: iter(self._store.list(prefix, chunk_size=_PAGE)))
        while batch := self._ask(f"LIST {prefix}", lambda: next(listing, None)):
            on_page()
            yield [(entry["path"], entry["size"]) for entry in batch if _OBJECT.fullmatch(entry["path"])]
            if time.monotonic() > deadline:
                raise TierUnavailableError(f"{prefix} of {self._url} holds more than {_PAGES_S:g} s are enough for")

    def _delete(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        try:
            self._ask(f"DELETE of {len(paths)} objects", lambda: self._store.delete(paths))
        except FileNotFoundError:  # a file; the others may still be there
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._ask(f"DELETE {path}", functools.partial(self._store.delete, path))

    def _receive(self, path: str, views: list[memoryview]) -> None:
        """Fill `views` with an object's bytes. Raises ChunkCorruptError unless it has just as many."""
        deadline = time.monotonic() + self._timeout_s
        expected = sum(map(len, views))
        result = self._store.get(path)
        if result.meta["size"] != expected:
            raise ChunkCorruptError(f"it has {result.meta['size']} bytes instead of {expected}")
        received = 0
        for piece in result.stream(min_chunk_size=_PIECE_BYTES):
            received += len(piece)
            if received > expected:
                break
            _put(memoryview(piece), views)
            if time.monotonic() > deadline:
                raise TierUnavailableError(f"{path} did not come from {self._url} within {self._timeout_s} s")
        if received != expected:
            raise ChunkCorruptError(f"{received} bytes came instead of {expected}")

    def _ask(self, what: str, call: Callable[[], _T]) -> _T:
        """Do a call of the store. Raises FileNotFoundError for what is not there, else TierError's children."""
        try:
            return call()
        except FileNotFoundError as error:
            if _NO_BUCKET in str(error):
                raise TierUnavailableError(f"the bucket of {self._url} does not exist: make it first") from None
            raise
        except (self._error, OSError, ValueError) as error:
            raise unavailable(error, self._url, what) from None


def _path(name: ChunkName) -> str:
    return f"{FOLDER}/{name.namespace.hex()}/{name.key.hex()}"


def _put(piece: memoryview, views: list[memoryview]) -> None:
    """Copy a piece to where `views` begin, and take off what is filled."""
    while len(piece):
        count = min(len(piece), len(views[0]))
        views[0][:count] = piece[:count]
        views[0] = views[0][count:]
        piece = piece[count:]
        if not len(views[0]):
            views.pop(0)
