"""What chunks take of a disk, and what is known of a search for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.cache import BytePool, Space
from kvferry.cache.tiers import ChunkName
from kvferry.cache.tiers.format import HEADER_BYTES
from kvferry.server.tiers.clears import OnGone

_BLOCK_BYTES = 4096  # file systems give whole ones


def file_bytes(nbytes: int) -> int:
    """What a chunk's file takes of a disk."""
    return HEADER_BYTES + -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


class FilePool(BytePool):
    """Counts chunks by what their files take."""

    def fits(self, nbytes: int) -> bool:
        """Whether an empty disk could hold a chunk of `nbytes`."""
        return super().fits(file_bytes(nbytes))

    def allocate(self, nbytes: int) -> int | None:
        """A number for a chunk of `nbytes`, or None where there is no room."""
        return super().allocate(file_bytes(nbytes))


@dataclass(slots=True)
class Search:
    """The search for what another run has left; what was `cleared` since may still be found, for that `waits`.

    `num_opened` is that of the tier when it was searched; see `TierDone`.
    """

    goes_on: bool = False
    num_torn: int = 0
    num_unlisted: int = 0
    num_opened: int = 1
    cleared: set[Space | ChunkName] = field(default_factory=set)
    waits: list[tuple[Space, bytes | None, OnGone]] = field(default_factory=list)
