"""What the loop thread asks of a lower tier's threads, and what they answer. Plain data, both ways.

Each task but `ScanTier` is answered by one `TierDone` with its id.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvferry.cache.tiers import ChunkMeta, ChunkName
from kvferry.cache.tiers.disk import StoredChunk
from kvferry.server.watch.transfers import Moved


@dataclass(frozen=True, slots=True)
class WriteChunk:
    """Keep the chunk that lies at `offset` of the server's memory, which stays as it is until the answer.

    `digest` is its checksum, where one is known.
    """

    task_id: int
    meta: ChunkMeta
    offset: int
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """Fill the server's memory from `offset` on, which nobody else uses until the answer."""

    task_id: int
    meta: ChunkMeta
    offset: int


@dataclass(frozen=True, slots=True)
class FindChunks:
    """How many of these, from the first on, are there?"""

    task_id: int
    names: tuple[ChunkName, ...]


@dataclass(frozen=True, slots=True)
class DeleteChunks:
    """Forget these."""

    task_id: int
    names: tuple[ChunkName, ...]


@dataclass(frozen=True, slots=True)
class DeleteNamespace:
    """Forget all of a namespace."""

    task_id: int
    namespace: bytes


@dataclass(frozen=True, slots=True)
class MeasureNamespace:
    """How many bytes does all of a namespace have?"""

    task_id: int
    namespace: bytes


@dataclass(frozen=True, slots=True)
class MeasureSpace:
    """How much room is left where the tier keeps its chunks?"""

    task_id: int


@dataclass(frozen=True, slots=True)
class ScanTier:
    """What is there? Answered by `TierScanned`, of which the last has `ended`."""


AnsweredTask = WriteChunk | ReadChunk | FindChunks | DeleteChunks | DeleteNamespace | MeasureNamespace | MeasureSpace
TierTask = AnsweredTask | ScanTier


class Outcome(enum.Enum):
    """How a task ended."""

    DONE = "done"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FULL = "full"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class TierDone:
    """A task has ended, and its memory is not touched any more.

    `value` is what FindChunks found or what was measured, `digest` the checksum of what ReadChunk has read.
    `num_opened` of MeasureSpace is how often the tier has taken its place: each time there may be something else in it.
    """

    tier: str
    task_id: int
    outcome: Outcome = Outcome.DONE
    text: str = ""
    value: int = 0
    digest: bytes = b""
    num_opened: int = 0
    moved: Moved | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TierMoved:
    """A task that takes long has come a bit further."""

    tier: str


@dataclass(frozen=True, slots=True)
class TierScanned:
    """Some of what is there, parents before children. `text` says why the scan ended early, where it did.

    `num_torn` is how many were found so far, and removed, that were not whole, `num_unlisted` how many folders of
    chunks could not be listed by this scan.
    """

    tier: str
    chunks: tuple[StoredChunk, ...]
    ended: bool
    text: str = ""
    num_torn: int = 0
    num_unlisted: int = 0


TierCompletion = TierDone | TierMoved | TierScanned
