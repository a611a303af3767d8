"""Files of chunks that the disk's index has no more, on their way out: a few at a time, and again where that failed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

from kvferry.cache import Chunk, ChunkIndex, ChunkState, Space
from kvferry.cache.tiers import ChunkName
from kvferry.server.tiers.clears import Files, Undeleted
from kvferry.server.tiers.files import file_bytes
from kvferry.server.tiers.queue import TierQueue, name_of
from kvferry.server.tiers.tasks import Outcome, TierDone

_NAMES_A_DELETION = 64
_FREED_A_ROUND = 1024


class Deletions:
    """Belongs to the loop thread. A chunk that is being written again takes its old file over, once it is written.

    Parameters
    ----------
    files
        Hears which of them are gone.
    """

    def __init__(self, queue: TierQueue, index: ChunkIndex, files: Files) -> None:
        self._queue = queue
        self._index = index
        self._files = files
        self._freed: list[Chunk] = []  # whose files are still there
        self._deleting: dict[ChunkName, Chunk] = {}
        self._undeleted: Undeleted[ChunkName, Chunk] = Undeleted("disk")

    def __len__(self) -> int:
        return len(self._freed) + len(self._deleting) + len(self._undeleted)

    def __contains__(self, name: ChunkName) -> bool:
        """Whether the file of that name is being deleted."""
        return name in self._deleting

    def want(self, name: ChunkName) -> bool:
        """Whether the file of that name is being deleted, or could not be."""
        return name in self._deleting or name in self._undeleted

    @property
    def going_on(self) -> bool:
        """Whether files are being deleted."""
        return bool(self._deleting)

    @property
    def to_come(self) -> bool:
        """Whether files are being deleted, or about to be; what could not be is not."""
        return bool(self._deleting or self._freed)

    @property
    def more(self) -> bool:
        """Whether there are more than one call of `begin` begins with."""
        return self._queue.usable and len(self._freed) > _FREED_A_ROUND

    @property
    def nbytes(self) -> int:
        """What the files take of the disk that are being deleted, or about to be."""
        return sum(file_bytes(chunk.nbytes) for chunk in itertools.chain(self._deleting.values(), self._freed))

    def of(self, space: Space) -> Iterator[Chunk]:
        """All of a space, also what could not be deleted."""
        leaving = itertools.chain(self._freed, self._deleting.values(), self._undeleted.values())
        return (chunk for chunk in leaving if chunk.space == space)

    def add(self, chunk: Chunk) -> None:
        """Its file is to go; `begin` begins with it."""
        self._freed.append(chunk)

    def begin(self) -> bool:
        """Delete the files of chunks that are in the index no more, some at a time; whether there are more."""
        if not self._freed or not self._queue.usable:
            return False
        gone: list[Chunk] = []
        freed, self._freed = self._freed[:_FREED_A_ROUND], self._freed[_FREED_A_ROUND:]
        more = bool(self._freed)
        for chunk in freed:
            there, name = self._index.find(chunk.space, chunk.key), name_of(chunk)
            if there is not None and there.state is ChunkState.RESERVED:
                self._freed.append(chunk)
            elif there is not None or name in self._deleting:
                self._files.go(chunk)
            else:
                self._deleting[name] = chunk
                gone.append(chunk)
        for first in range(0, len(gone), _NAMES_A_DELETION):
            batch = gone[first : first + _NAMES_A_DELETION]
            names = tuple(name_of(chunk) for chunk in batch)
            self._queue.delete(names, functools.partial(self._on_deleted, batch))
        return more

    def hurry(self) -> None:
        """Try again now what could not be deleted."""
        self._undeleted.hurry()
        self._try_again()

    def tick(self, now: float) -> None:
        """Time passes: try again what could not be deleted, if it is time to."""
        self._undeleted.tick(now)
        self._try_again()
        self.begin()

    def _on_deleted(self, batch: Sequence[Chunk], done: TierDone) -> None:
        for chunk in batch:
            del self._deleting[name_of(chunk)]
            if done.outcome is Outcome.DONE:
                self._files.go(chunk)
            else:
                self._keep(chunk, done.text)

    def _keep(self, chunk: Chunk, text: str) -> None:
        """Its file may still be there: delete it later."""
        replaced = self._undeleted.add(name_of(chunk), chunk, text)
        if replaced is not None:
            self._files.go(replaced)
        self._files.fail(chunk, text)

    def _try_again(self) -> None:
        if self._queue.usable:
            self._freed += self._undeleted.take(busy=bool(self._deleting))
