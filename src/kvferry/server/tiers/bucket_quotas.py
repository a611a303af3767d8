"""How much of a bucket each tenant has filled, where it has a quota there: found out, since others write there, too."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvferry.cache import Quotas, Space
from kvferry.cache.tiers.format import HEADER_BYTES
from kvferry.server.tiers.queue import TierQueue
from kvferry.server.tiers.tasks import Outcome, TierDone

_LOG = logging.getLogger(__name__)

_AGAIN_S = 600.0
_AFTER_FAILURE_S = 30.0
_MAX_SPACES = 4096


@dataclass(slots=True)
class _Filled:
    """What lies in one space: `measured` bytes, None where that is not known, what was written since, and is now."""

    measured: int | None = None
    written: int = 0
    writing: int = 0
    measure_at: float | None = 0.0  # None while it is being measured
    outdated: bool = False  # what is being measured


class BucketQuotas:
    """Belongs to the loop thread. A space of a tenant with a quota is measured before the first write, and again later.

    Nothing is written for a tenant while the size of one of its spaces is not known.
    """

    def __init__(self, queue: TierQueue, quotas: Mapping[str, int]) -> None:
        self._queue = queue
        self._quotas = Quotas(quotas)
        self._filled: dict[Space, _Filled] = {}
        self._now = time.monotonic()
        self._failed = False
        self.num_skipped = 0  # chunks

    def look_at(self, space: Space) -> None:
        """The space is in use: know how much it has by the time that something is written."""
        if self._quotas.limit(space.tenant) is not None and (space in self._filled or len(self._filled) < _MAX_SPACES):
            filled = self._filled.setdefault(space, _Filled())
            if self._queue.usable and filled.measure_at is not None and self._now >= filled.measure_at:
                filled.measure_at, filled.outdated = None, False
                on_end = functools.partial(self._on_measured, filled, filled.written)
                self._queue.measure_namespace(space.digest, on_end)

    def knows(self, space: Space) -> bool:
        """Whether it is known how much the tenant has, if it has a quota."""
        limited = self._quotas.limit(space.tenant) is not None
        return not limited or (space in self._filled and None not in [each.measured for each in self._of(space.tenant)])

    def fits(self, space: Space, nbytes: int) -> bool:
        """Whether a chunk more may be written, as far as the tenant's quota goes."""
        limit = self._quotas.limit(space.tenant)
        if limit is None:
            return True
        self.look_at(space)
        used = sum((each.measured or 0) + each.written + each.writing for each in self._of(space.tenant))
        return self.knows(space) and used + HEADER_BYTES + nbytes <= limit

    def _of(self, tenant: str) -> Iterator[_Filled]:
        return (filled for space, filled in self._filled.items() if space.tenant == tenant)

    def begin_write(self, space: Space, nbytes: int) -> None:
        """A chunk is on its way."""
        if space in self._filled:
            self._filled[space].writing += HEADER_BYTES + nbytes

    def end_write(self, space: Space, nbytes: int, *, well: bool) -> None:
        """It is there, or was not written."""
        if space in self._filled:
            self._filled[space].writing -= HEADER_BYTES + nbytes
            self._filled[space].written += well * (HEADER_BYTES + nbytes)

    def forget(self, namespace: bytes) -> None:
        """All of a namespace was deleted: see what is left."""
        for space, filled in self._filled.items():
            if space.digest == namespace:
                filled.outdated = True
                filled.measure_at = None if filled.measure_at is None else 0.0

    def tick(self, now: float) -> None:
        """Measure again what was measured long ago."""
        self._now = now
        for space in self._filled:
            self.look_at(space)

    def _on_measured(self, filled: _Filled, before: int, done: TierDone) -> None:
        """`before` had been written when it began; what was written meanwhile may count twice until the next time."""
        if done.outcome is Outcome.DONE:
            filled.measured, filled.written = done.value, filled.written - before
            filled.measure_at = 0.0 if filled.outdated else self._now + _AGAIN_S
            self._failed = False
            return
        filled.measure_at = self._now + _AFTER_FAILURE_S
        if not self._failed:
            self._failed = True
            _LOG.error("what a tenant with a quota has in the bucket cannot be found out: %s", done.text)
