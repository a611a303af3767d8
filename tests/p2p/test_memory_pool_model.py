"""The buddy allocator against a model that only knows which bytes are in use."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.p2p.buddy import BuddyAllocator

UNIT = 16


class Books(RuleBasedStateMachine):
    """`used` is what the model knows: offset -> size of every block in use."""

    @initialize(units=st.integers(1, 100))
    def begin(self, units: int) -> None:
        self.books = BuddyAllocator(units * UNIT + UNIT // 2, UNIT)
        self.whole = list(self.books.largest_blocks())
        self.used: dict[int, int] = {}
        assert sum(size for _, size in self.whole) == units * UNIT

    def fits(self, size: int) -> bool:
        """Whether some aligned place of that size has no byte in use: then the allocator has to find one."""
        places = [at for offset, whole in self.whole for at in range(offset, offset + whole - size + 1, size)]
        return any(
            all(other + length <= at or at + size <= other for other, length in self.used.items()) for at in places
        )

    @rule(nbytes=st.one_of(st.integers(1, 4 * UNIT), st.integers(1, 120 * UNIT)))
    def allocate(self, nbytes: int) -> None:
        size = UNIT
        while size < nbytes:
            size *= 2
        fits = self.fits(size)
        offset = self.books.allocate(nbytes)
        assert (offset is not None) == fits
        if offset is not None:
            assert all(other + length <= offset or offset + size <= other for other, length in self.used.items())
            assert 0 <= offset <= self.books.pool_bytes - size
            assert offset % size == 0
            self.used[offset] = size

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.used)))
        assert self.books.free(offset)
        del self.used[offset]

    @rule(offset=st.integers(-UNIT, 130 * UNIT))
    def free_what_is_not_given_out(self, offset: int) -> None:
        if offset not in self.used:
            assert not self.books.free(offset)

    @rule()
    def free_all(self) -> None:
        for offset in list(self.used):
            self.free_one(offset)
        assert self.books.largest_free == self.whole[0][1]

    def free_one(self, offset: int) -> None:
        assert self.books.free(offset)
        del self.used[offset]

    @invariant()
    def counts_are_exact(self) -> None:
        if hasattr(self, "books"):
            assert self.books.used_bytes == sum(self.used.values())
            assert self.books.num_blocks == len(self.used)
            assert self.books.largest_free == 0 or self.fits(self.books.largest_free)


Books.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase
