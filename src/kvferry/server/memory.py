"""The server's own host memory: one segment, given out in pieces."""

from __future__ import annotations

import mmap

from kvferry.ipc.shared_memory import Segment

PIECE_BYTES = 256 << 20
# Pieces are pinned one by one, and a copy must not run from one into the next: a page between them keeps them apart.
GUARD_BYTES = mmap.PAGESIZE


class Memory:
    """`nbytes`, rounded up to whole pages, at `address`; `pieces` are (offset, bytes), untouched at first.

    `piece_bytes` is a whole number of pages, so that every piece is.
    """

    def __init__(self, nbytes: int, piece_bytes: int = PIECE_BYTES) -> None:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        sizes = [min(piece_bytes, nbytes - start) for start in range(0, nbytes, piece_bytes)]
        self.pieces: list[tuple[int, int]] = []
        offset = 0
        for size in sizes:
            self.pieces.append((offset, size))
            offset += size + GUARD_BYTES
        self._segment: Segment | None = Segment(offset)
        self.address = self._segment.address

    def close(self) -> None:
        """Give the memory back; no copy may use it any more. Idempotent."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
