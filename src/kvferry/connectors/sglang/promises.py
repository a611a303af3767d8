"""What lookups have promised to requests that have not loaded it yet."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.connectors.sglang.questions import Questions, Run
from kvferry.layout import HASH_BYTES

KEPT_S = 20.0  # less than a lease lives
ASKED_AGAIN_S = 1.0
MAX_PROMISES = 1024


@dataclass(slots=True, eq=False)
class Promise:
    """`runs` of the pages of `keys`, all of which can be loaded until they are released."""

    keys: bytes
    runs: list[Run]
    made_s: float

    @property
    def num_pages(self) -> int:
        """How many pages from the first on."""
        return sum(run.num_pages for run in self.runs)


class Promises:
    """By request. One thread, the scheduler's.

    SGLang asks for a waiting request again and again, and does not say when it has lost interest: a promise that is
    old is given back.
    """

    def __init__(self, questions: Questions, clock: Callable[[], float] = time.monotonic) -> None:
        self._questions = questions
        self._clock = clock
        self._promises: OrderedDict[str, Promise] = OrderedDict()

    def __len__(self) -> int:
        return len(self._promises)

    def ask(self, rid: str, keys: bytes) -> int:
        """How many pages of `keys` are promised to the request now."""
        self._drop_old()
        known = self._promises.get(rid)
        if known is not None and known.keys == keys:
            age_s = self._clock() - known.made_s
            if age_s < ASKED_AGAIN_S or (known.num_pages * HASH_BYTES == len(keys) and age_s < KEPT_S / 2):
                return known.num_pages
        promise = Promise(keys, self._questions.runs(keys), self._clock())
        self.forget(rid)
        if promise.runs:
            self._promises[rid] = promise
        return promise.num_pages

    def take(self, rid: str, keys: bytes) -> list[Run] | None:
        """Runs of just these pages, which are the caller's now; None where that is no longer promised."""
        promise = self._promises.pop(rid, None)
        num_pages = len(keys) // HASH_BYTES
        if promise is not None and promise.keys == keys and promise.num_pages == num_pages:
            return promise.runs
        # A part of the promise, since another rank has less: a lease is loaded as a whole, so that is asked for anew.
        runs = self._questions.runs(keys)
        if promise is not None:
            self._questions.give_back(promise.runs)
        if sum(run.num_pages for run in runs) == num_pages:
            return runs
        self._questions.give_back(runs)
        return None

    def forget(self, rid: str) -> None:
        """Give a request's promise back. Idempotent."""
        promise = self._promises.pop(rid, None)
        if promise is not None:
            self._questions.give_back(promise.runs)

    def clear(self) -> None:
        """Give all back."""
        for rid in list(self._promises):
            self.forget(rid)

    def _drop_old(self) -> None:
        now = self._clock()
        while self._promises:
            rid, promise = next(iter(self._promises.items()))
            if now - promise.made_s < KEPT_S and len(self._promises) < MAX_PROMISES:
                return
            self.forget(rid)
