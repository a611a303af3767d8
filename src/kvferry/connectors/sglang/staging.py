"""Memory between SGLang's host pool and the cache server.

The server never maps the pool itself. A HiCache call has to return in bounded time, and the pool's pages may be another
prompt's right after, while a server that was stopped for a moment could still be about to read or write them. What it
touches late here is nobody's. Besides, SGLang's own shared pools (`allocator: shm`) are not sealed against shrinking,
so that no server that wants to live would map them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch

from kvferry.client import Job, RetrieveResult, StoreResult
from kvferry.connectors.sglang.host_pool import HostPages
from kvferry.errors import DeadlineError, LayoutError
from kvferry.ipc import allocate_shared

AnyJob = Job[StoreResult] | Job[RetrieveResult]
MAX_SLOTS = 256  # SGLang asks for 128 pages at a time
_CANCEL_S = 0.5


class Staging:
    """`pages[slot]` is a page of the pool's shape. Half of the slots are for reads, half for writes."""

    def __init__(self, pool: HostPages, nbytes: int) -> None:
        count = min(nbytes // pool.page_bytes, MAX_SLOTS)
        if count < 2:
            raise LayoutError(
                f"a page has {pool.page_bytes} bytes, so that two do not fit into staging_bytes, {nbytes}; "
                f"set at least {2 * pool.page_bytes}"
            )
        self.pages = allocate_shared((count, *pool.view.shape[1:]), pool.view.dtype)
        self.for_reads = Slots(range(count // 2))
        self.for_writes = Slots(range(count // 2, count))


class Slots:
    """Who has which slots. Any thread may ask.

    A job that does not end in time keeps its slots until it has ended, whoever has long given it up.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self._lock = threading.Lock()  # guards the lists
        self._free = list(slots)
        self._late: list[tuple[AnyJob, list[int]]] = []

    @property
    def num_free(self) -> int:
        """How many can be had now."""
        with self._lock:
            self._reclaim()
            return len(self._free)

    @contextlib.contextmanager
    def some(self, wanted: int) -> Iterator[Borrowed]:
        """At most so many slots, or none, for the time of the block."""
        with self._lock:
            self._reclaim()
            taken, self._free = self._free[:wanted], self._free[wanted:]
        borrowed = Borrowed(taken)
        try:
            yield borrowed
        finally:
            self._give_back(borrowed)

    def _give_back(self, borrowed: Borrowed) -> None:
        job = borrowed.job
        if job is not None and not job.done():
            with contextlib.suppress(DeadlineError):
                job.cancel(_CANCEL_S)
        with self._lock:
            if job is None or job.done():
                self._free += borrowed.slots
            else:
                self._late.append((job, borrowed.slots))

    def _reclaim(self) -> None:
        for job, slots in self._late:
            if job.done():
                self._free += slots
        self._late = [(job, slots) for job, slots in self._late if not job.done()]


class Borrowed:
    """Slots, and the job that is to move bytes there, once there is one."""

    __slots__ = ("job", "slots")

    def __init__(self, slots: list[int]) -> None:
        self.slots = slots
        self.job: AnyJob | None = None


def copy_in(staging: Staging, slots: Sequence[int], pool: HostPages, pages: Sequence[int]) -> None:
    """Copy pages of the pool into slots."""
    for slot, page in zip(slots, pages, strict=True):
        staging.pages[slot].copy_(pool.view[page])


def copy_out(staging: Staging, slots: Sequence[int], pool: HostPages, pages: Sequence[int]) -> None:
    """Copy slots into pages of the pool."""
    for slot, page in zip(slots, pages, strict=True):
        pool.view[page].copy_(staging.pages[slot])


def numbers_of_pages(host_indices: torch.Tensor, page_tokens: int) -> list[int]:
    """The pages that token indices stand for, `page_tokens` a page. Raises ValueError for what are not whole pages."""
    indices = host_indices.reshape(-1)
    if len(indices) % page_tokens:
        raise ValueError(f"{len(indices)} token indices are no whole pages of {page_tokens}")
    runs = indices.view(-1, page_tokens)
    firsts = runs[:, 0]
    if len(firsts) and (
        bool((firsts % page_tokens).any()) or not bool((runs == firsts[:, None] + torch.arange(page_tokens)).all())
    ):
        raise ValueError("token indices that are not those of whole pages, in order")
    return [int(page) for page in (firsts // page_tokens).tolist()]
