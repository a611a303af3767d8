"""Which bytes of a pool are in use: buddy allocation, over offsets, without any memory."""

from __future__ import annotations

from collections.abc import Iterator


class BuddyAllocator:
    """Blocks of `min_block` times a power of two; halves are split off when needed, and joined when both are free.

    A pool of any size: its largest blocks are those of its size's binary digits, the largest first, so that each lies
    at a multiple of its own size. For one thread at a time.
    """

    def __init__(self, pool_bytes: int, min_block: int) -> None:
        if min_block < 1 or pool_bytes < min_block:
            raise ValueError(f"a pool of {pool_bytes} bytes has no room for one block of {min_block}")
        self.min_block = min_block
        self.pool_bytes = pool_bytes // min_block * min_block
        self.used_bytes = 0
        self._blocks: dict[int, int] = {}  # offset -> size, of those in use
        # size -> offsets of the free ones, as keys in the order in which they were freed
        self._free: dict[int, dict[int, None]] = {}
        for offset, size in self.largest_blocks():
            self._free.setdefault(size, {})[offset] = None

    def largest_blocks(self) -> Iterator[tuple[int, int]]:
        """(offset, size) of the blocks that the pool consists of when nothing is in use."""
        offset, units = 0, self.pool_bytes // self.min_block
        for digit in reversed(range(units.bit_length())):
            if units >> digit & 1:
                size = self.min_block << digit
                yield offset, size
                offset += size

    @property
    def num_blocks(self) -> int:
        """Those in use."""
        return len(self._blocks)

    @property
    def largest_free(self) -> int:
        """The most that can be allocated at once now, in bytes."""
        return max((size for size, offsets in self._free.items() if offsets), default=0)

    def block_size(self, nbytes: int) -> int:
        """What an allocation of so many bytes takes."""
        size = self.min_block
        while size < nbytes:
            size *= 2
        return size

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a block that holds so many bytes; None where there is none."""
        wanted = self.block_size(nbytes)
        fitting = [size for size, offsets in self._free.items() if offsets and size >= wanted]
        if not fitting:
            return None
        size = min(fitting)
        offset, _ = self._free[size].popitem()
        while size > wanted:
            size //= 2
            self._free.setdefault(size, {})[offset + size] = None
        self._blocks[offset] = size
        self.used_bytes += size
        return offset

    def free(self, offset: int) -> bool:
        """Take the block at that offset back; False where none that is in use begins there."""
        size = self._blocks.pop(offset, None)
        if size is None:
            return False
        self.used_bytes -= size
        # A largest block's buddy would lie beyond the pool, or in a smaller block: it is never among the free ones.
        while (offset ^ size) in self._free.get(size, {}):
            del self._free[size][offset ^ size]
            offset &= ~size
            size *= 2
        self._free.setdefault(size, {})[offset] = None
        return True
