"""What a chunk is to the index: whose it is, where it lies, what it hangs from."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Space(NamedTuple):
    """Where keys mean the same: a tenant's, and `digest`, which keeps models, layouts and ranks apart."""

    tenant: str
    digest: bytes


class ChunkState(enum.Enum):
    """RESERVED: being written, invisible. COMMITTED: whole. GONE: in no lookup any more, for whatever reason."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    GONE = "gone"


class Listing:
    """The chunks of one space by key, in an order in which parents come before children.

    Once it is `closed` no lookup finds them, and all that is left of it is to give their places back.
    """

    __slots__ = ("chunks", "closed", "num_whole", "space")

    def __init__(self, space: Space) -> None:
        self.space = space
        self.chunks: dict[bytes, Chunk] = {}
        self.closed = False
        self.num_whole = 0  # committed


class Chunk:
    """One chunk of one rank's KV: where it lies, and its place in the tree. Its index changes it, but for `digest`.

    `depth` counts the chunks of the chain that ends here. It is `dirty` while lower tiers do not have it yet. `digest`
    is the checksum of its bytes, where one is kept. `stage` and `shown` are its state and visibility while its space is
    not forgotten.
    """

    __slots__ = (
        "children",
        "depth",
        "digest",
        "dirty",
        "key",
        "last_use",
        "listing",
        "nbytes",
        "offset",
        "parent",
        "pins",
        "queued",
        "shown",
        "space",
        "stage",
    )

    def __init__(self, space: Space, key: bytes, parent: Chunk | None, offset: int, nbytes: int) -> None:
        self.space = space
        self.key = key
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.shown = False
        self.dirty = False
        self.digest = b""
        self.offset = offset
        self.nbytes = nbytes
        self.children: set[Chunk] = set()
        self.pins = 0
        self.last_use = 0
        self.queued = False
        self.stage = ChunkState.RESERVED
        self.listing: Listing | None = None

    def __repr__(self) -> str:
        return f"<Chunk {self.key[:4].hex()} {self.state.value} pins={self.pins} children={len(self.children)}>"

    @property
    def state(self) -> ChunkState:
        """What it is to others."""
        return ChunkState.GONE if self._is_cleared else self.stage

    @property
    def visible(self) -> bool:
        """Whether lookups find it: all chunks of the chain that ends here are committed."""
        return self.shown and not self._is_cleared

    @property
    def evictable(self) -> bool:
        """Whether nothing needs it: no chunk below, no lease or copy, no lower tier."""
        # Asked several times for each chunk that is evicted: `state` is written out here.
        if self.children or self.pins or self.dirty or self.stage is not ChunkState.COMMITTED:
            return False
        return self.listing is None or not self.listing.closed

    @property
    def _is_cleared(self) -> bool:
        return self.listing is not None and self.listing.closed

    def chain(self) -> list[Chunk]:
        """All chunks of the chain that ends here, root first."""
        chain: list[Chunk] = []
        link: Chunk | None = self
        while link is not None:
            chain.append(link)
            link = link.parent
        chain.reverse()
        return chain

    def show(self) -> list[Chunk]:
        """Make a committed chunk visible, and what is committed below it; all of these, parents first."""
        shown = [self]
        for chunk in shown:
            chunk.shown = True
            shown.extend(child for child in chunk.children if child.stage is ChunkState.COMMITTED)
        return shown

    def below(self) -> list[Chunk]:
        """This chunk and all below it that are not gone, parents first."""
        below = [self]
        for chunk in below:
            below.extend(child for child in chunk.children if child.stage is not ChunkState.GONE)
        return below

    def at_depth(self, depth: int) -> Chunk:
        """The chunk of the same chain at `depth`, which is at most its own."""
        chunk = self
        while chunk.depth > depth:
            assert chunk.parent is not None
            chunk = chunk.parent
        return chunk


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a store has to write: `chunks[i]` is the chunk at position `first + i` of the prompt.

    `last_there` is the last chunk that was there already, and `num_there` of these were asked for; `num_skipped` found
    no place.
    """

    first: int
    chunks: tuple[Chunk, ...]
    last_there: Chunk | None
    num_there: int
    num_skipped: int

    @property
    def num_present(self) -> int:
        """How many of those that were there can be looked up now: others are being written, or were forgotten."""
        link, num_hidden = self.last_there, 0
        while link is not None and not link.visible and num_hidden < self.num_there:
            link, num_hidden = link.parent, num_hidden + 1
        return self.num_there - num_hidden

    @property
    def num_stored(self) -> int:
        """How many of `chunks` can be looked up now."""
        return sum(chunk.visible for chunk in self.chunks)

    @property
    def num_unsure(self) -> int:
        """How many cannot be looked up though they have a place: what another store writes may come, or not."""
        fresh = (chunk for chunk in self.chunks if chunk.state is not ChunkState.GONE)
        return self.num_there - self.num_present + sum(not chunk.visible for chunk in fresh)


@dataclass(slots=True)
class IndexCounters:
    """What has happened so far, in chunks. Skipped: why a store, or a part of it, found no place.

    `skipped_behind`: what could have gone is not in the lower tiers yet. `skipped_unsure`: it has a place, but hangs on
    another store that had not ended.
    """

    committed: int = 0
    aborted: int = 0
    evicted: int = 0
    discarded: int = 0
    skipped_full: int = 0
    skipped_behind: int = 0
    skipped_quota: int = 0
    skipped_share: int = 0
    skipped_orphan: int = 0
    skipped_unsure: int = 0
