"""What the loop thread asks of a device's worker, and what the worker answers. Plain data, both ways.

A cache is one registration; its id is the server's and never used again. Descriptors in a task are the worker's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvferry.ipc.events import Ticket
from kvferry.layout import KVLayout
from kvferry.server.watch.transfers import Moved


class Direction(enum.Enum):
    """GATHER: from the engine's blocks into chunks. SCATTER: from chunks into blocks."""

    GATHER = "gather"
    SCATTER = "scatter"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something did not happen: a stable code, and a text for people."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class OpenTask:
    """Take in a cache: `num_fds` descriptors of its wrappers and `num_event_fds` of its events are still to come.

    `probes` are the offsets, one a storage, at which it is read to prove that it is mapped; none: at 0.
    """

    cache_id: int
    layout: KVLayout
    device_uuid: str
    wrappers: bytes
    num_fds: int
    events: bytes
    num_event_fds: int
    probes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FdsTask:
    """The next descriptors of a cache that is being opened."""

    cache_id: int
    fds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyTask:
    """Copy whole chunks, once `ticket` is done and before `deadline` (`time.monotonic`).

    `block_ids` are int32, equally many a chunk; chunk `i` lies at `offsets[i]` of the server's memory. The first
    `skip_blocks` blocks are left as they are. Where there are `digests`, one a chunk, what is gathered gets a checksum,
    and what is scattered is checked against its own first (but for one of no bytes, which is not known). What is
    scattered may go in `stages`, each some planes of all chunks; there are no more of them than planes.
    """

    cache_id: int
    job_id: int
    direction: Direction
    block_ids: bytes
    offsets: tuple[int, ...]
    skip_blocks: int
    ticket: Ticket | None
    deadline: float
    digests: tuple[bytes, ...] | None = None
    stages: int = 1


@dataclass(frozen=True, slots=True)
class CloseTask:
    """Drop a cache: its waiting copies, its events, its mappings. Answered even where there is no such cache."""

    cache_id: int


@dataclass(frozen=True, slots=True)
class PrepareTask:
    """Make a piece of the server's memory ready for copies; its first `done` bytes are."""

    offset: int
    nbytes: int
    done: int = 0


Task = OpenTask | FdsTask | CopyTask | CloseTask | PrepareTask


@dataclass(frozen=True, slots=True)
class FdsTaken:
    """`received` descriptors of the cache have been imported and closed so far."""

    cache_id: int
    received: int


@dataclass(frozen=True, slots=True)
class CacheOpened:
    """The cache is mapped: what its storages hold at the probes. Or it is not, and what was open is closed again."""

    cache_id: int
    nonces: tuple[bytes, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class StageDone:
    """The first `stages` stages of a copy are in place, and there are more."""

    cache_id: int
    job_id: int
    stages: int


@dataclass(frozen=True, slots=True)
class CopyDone:
    """A copy has ended, and no byte of it moves any more: the first `num_chunks` are whole.

    `digests` are the checksums of what was gathered, where they were asked for. `damaged` is the number of a chunk that
    has not its own.
    """

    cache_id: int
    job_id: int
    num_chunks: int
    failure: Failure | None = None
    digests: tuple[bytes, ...] = ()
    damaged: int | None = None
    moved: Moved | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class CacheClosed:
    """Nothing of the cache is mapped any more, or, with `failure`, that is not known yet."""

    cache_id: int
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class MemoryReady:
    """The piece may be used."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The device can do no more work in this process: the server has to end."""

    device: str
    text: str


Completion = FdsTaken | CacheOpened | StageDone | CopyDone | CacheClosed | MemoryReady | WorkerFailed
