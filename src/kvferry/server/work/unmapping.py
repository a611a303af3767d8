"""Caches on their way out: let go of, and answered for once nothing of them is mapped any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import DeadlineError
from kvferry.ipc.table import process_table
from kvferry.server.work.opened import OpenedCache
from kvferry.server.work.tasks import CacheClosed, Failure

_LOG = logging.getLogger(__name__)

_LIMIT_S = 10.0
_LOOK_S = 0.001


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A cache that has been let go of; `ended` says whether all that was released by then is unmapped."""

    cache_id: int
    ended: Callable[[], bool]
    give_up_at: float


class Unmappings:
    """Belongs to the worker's thread, which never waits here: another thread unmaps, and `look` finds what is done.

    So an engine whose memory takes long to unmap holds up no other. `post` takes the answers.
    """

    def __init__(self, name: str, post: Callable[[CacheClosed], None]) -> None:
        self._name = name
        self._post = post
        self._storages: dict[int, str] = {}  # of caches that may be mapped still, for people
        self._leaving: list[_Leaving] = []

    @property
    def wait_s(self) -> float | None:
        """When to look again; None where nothing is on its way out."""
        return _LOOK_S if self._leaving else None

    def let_go(self, cache_id: int, cache: OpenedCache) -> None:
        """Close a cache, of which no copy is running; what fails is logged."""
        self._storages[cache_id] = cache.storage_names()
        for error in cache.close():
            _LOG.error("closing cache %d of %s: %s", cache_id, self._name, error)

    def answer(self, cache_id: int) -> None:
        """Post CacheClosed for a cache that was let go of: once it is unmapped, or as failed where that takes too long.

        May be asked again then.
        """
        ended = process_table().mappings.unmapping()
        self._leaving.append(_Leaving(cache_id, ended, time.monotonic() + _LIMIT_S))
        self.look()

    def look(self) -> None:
        """Answer for those that are unmapped by now, or late."""
        if not self._leaving:
            return
        now = time.monotonic()
        still: list[_Leaving] = []
        for leaving in self._leaving:
            if leaving.ended():
                self._storages.pop(leaving.cache_id, None)
                self._post(CacheClosed(leaving.cache_id))
            elif now >= leaving.give_up_at:
                self._post(CacheClosed(leaving.cache_id, self._late(leaving.cache_id)))
            else:
                still.append(leaving)
        self._leaving = still

    def finish(self) -> None:
        """Wait, at the worker's end, until everything is unmapped; what is late then is logged."""
        try:
            process_table().mappings.drain(_LIMIT_S)
        except DeadlineError as error:
            _LOG.error("at the end of %s, these may be mapped still: %s: %s", self._name, self._storages, error)

    def _late(self, cache_id: int) -> Failure:
        names = self._storages.get(cache_id, "none")
        text = f"the server may have these storages still mapped, after {_LIMIT_S:g} s: {names}; ask again"
        _LOG.error("closing cache %d of %s: %s", cache_id, self._name, text)
        return Failure("mapped", text)
