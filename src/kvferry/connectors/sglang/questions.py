"""What the cache server has of a prompt's pages, asked in bounded time."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable

from kvferry.client import CacheClient, Lookup
from kvferry.errors import DeadlineError, KVFerryError
from kvferry.layout import HASH_BYTES, ChunkKeys

MAX_DOUBLINGS = 4  # of a pause
_NOTHING = Lookup(0, 0)
_LOG = logging.getLogger("sglang.kvferry")


class Questions:
    """Looks up for one client. Any thread may.

    A server that has not answered in time is asked nothing for `pause_s`, and for longer each time that it has not:
    whoever asks is a thread that SGLang's requests wait for. Meanwhile, and while there is no server, nothing is found.
    """

    def __init__(
        self,
        client: CacheClient,
        *,
        page_tokens: int,
        pause_s: float,
        answer_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._page_tokens = page_tokens
        self._pause_s = pause_s
        self._answer_timeout_s = answer_timeout_s
        self._clock = clock
        self._names = itertools.count()
        self._lock = threading.Lock()  # guards what follows
        self._asks_again_at = float("-inf")
        self._num_late = 0
        self._told: set[str] = set()

    @property
    def is_patient(self) -> bool:
        """Whether there is a server that may be asked now."""
        with self._lock:
            if self._clock() < self._asks_again_at:
                return False
        return self._client.connected and not self._client.congested

    def pause(self) -> None:
        """The server was late: leave it alone for a while."""
        with self._lock:
            self._asks_again_at = self._clock() + self._pause_s * 2 ** min(self._num_late, MAX_DOUBLINGS)
            self._num_late += 1

    def lookup(self, keys: bytes, *, wait_s: float = 0.0) -> tuple[int, int]:
        """How many pages at the start of `keys` lie in one chain, and the lease on them, to be given back."""
        if not keys or not self.is_patient:
            return 0, 0
        found = _NOTHING
        try:
            found = self._client.lookup(f"pages {next(self._names)}", ChunkKeys(keys), wait_s=wait_s)
        except DeadlineError:
            self.pause()
        except (KVFerryError, ValueError) as error:
            self._tell(error)
        else:
            with self._lock:
                self._num_late = 0
                self._told.clear()
        return found.tokens // self._page_tokens, found.lease_id

    def _tell(self, error: Exception) -> None:
        """Log each kind of failure once, until a lookup goes well again."""
        kind = f"{type(error).__name__} {getattr(error, 'code', '')}"
        with self._lock:
            told = kind in self._told
            self._told.add(kind)
        if not told:
            _LOG.warning("a lookup failed, so its tokens are computed: %s; this is told once", error)

    def release(self, lease_id: int) -> None:
        """Give a promise back; an overdue lease ends by itself."""
        try:
            self._client.release(lease_id)
        except KVFerryError as error:
            _LOG.debug("a promise could not be given back: %s", error)

    def runs(self, keys: bytes, *, prefix: bytes = b"", wait_s: float = 0.0) -> list[Run]:
        """The pages at the start of `keys` that are there, chain by chain; the caller gives all leases back.

        Pages that were stored without the ones before them begin a chain of their own. With the keys of all pages
        before, what lower tiers have is found, too.
        """
        end = self._clock() + self._answer_timeout_s + wait_s
        runs: list[Run] = []
        at, skip = 0, len(prefix) // HASH_BYTES
        if prefix:
            count, lease_id = self.lookup(prefix + keys, wait_s=wait_s)
            if count > skip:
                runs.append(Run(lease_id, 0, count - skip, skip))
                at = count - skip
            else:
                self.release(lease_id)
        while at * HASH_BYTES < len(keys) and self._clock() < end:
            count, lease_id = self.lookup(keys[at * HASH_BYTES :], wait_s=0.0 if at or prefix else wait_s)
            if not count:
                break
            runs.append(Run(lease_id, at, count, 0))
            at += count
        return runs

    def count(self, keys: bytes, *, prefix: bytes = b"", wait_s: float = 0.0) -> int:
        """How many pages at the start of `keys` are there; they are not kept for anybody."""
        runs = self.runs(keys, prefix=prefix, wait_s=wait_s)
        self.give_back(runs)
        return sum(run.num_pages for run in runs)

    def give_back(self, runs: list[Run]) -> None:
        """Release all, the last first: what was released last was used last, and a prompt's beginning goes last."""
        for run in reversed(runs):
            self.release(run.lease_id)


class Run:
    """`num_pages` pages from page `start` on, promised under a lease that has `skip` more before them."""

    __slots__ = ("lease_id", "num_pages", "skip", "start")

    def __init__(self, lease_id: int, start: int, num_pages: int, skip: int) -> None:
        self.lease_id = lease_id
        self.start = start
        self.num_pages = num_pages
        self.skip = skip

    def __repr__(self) -> str:
        return f"<Run of pages {self.start} to {self.start + self.num_pages}>"
