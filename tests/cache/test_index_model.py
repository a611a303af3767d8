"""ChunkIndex against its model: random operations of two tenants, one of them with a quota, in too small a pool.

Prompts are over two letters, so that chains branch; the chunks of each space have a size of their own.
"""

from __future__ import annotations

import functools
import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache_model import Model, ModelChunk
from kvferry.cache import BytePool, Chunk, ChunkIndex, Quotas, Space

SIZES = {Space("a", b"1" * 32): 2, Space("a", b"2" * 32): 3, Space("b", b"3" * 32): 2}
CAPACITY = 20
LIMITS = {"a": 13}
COUNTERS = ("committed", "aborted", "evicted", "discarded", "skipped_full", "skipped_behind", "skipped_quota")


def keys(prompt: str) -> list[bytes]:
    """One key a letter; prompts that start alike share keys."""
    return [hashlib.sha256(prompt[: end + 1].encode()).digest() for end in range(len(prompt))]


class IndexMachine(RuleBasedStateMachine):
    """Each rule does the same to both, and what they say must be the same."""

    spaces = st.sampled_from(list(SIZES))
    tenants = st.sampled_from(("a", "b", None))
    prompts = st.sampled_from(("a", "ab", "aba", "abab", "abb", "b", "ba"))
    picks = st.integers(0, 1000)

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.pool = BytePool(CAPACITY, self.freed.append)
        self.index = ChunkIndex(self.pool, quotas=Quotas(LIMITS))
        self.model = Model(CAPACITY, LIMITS)
        self.writing: list[list[ModelChunk]] = []
        self.pinned: list[ModelChunk] = []

    @rule(
        space=spaces,
        prompt=prompts,
        start=st.integers(0, 2),
        limit=st.sampled_from((None, None, 1, 2)),
        ending=st.sampled_from(("clean", "dirty", "later", "later")),
    )
    def store(self, space: Space, prompt: str, start: int, limit: int | None, ending: str) -> None:
        start = min(start, len(prompt))
        reservation = self.index.reserve(space, keys(prompt), SIZES[space], start, limit=limit)
        fresh: list[ModelChunk] = []
        parent: ModelChunk | None = None
        kept, reason = 0, None
        for position, key in enumerate(keys(prompt)):
            chunk = self.model.find(space, key)
            if chunk is None:
                if position < start or (limit is not None and len(fresh) == limit):
                    reason = "skipped_orphan" if position < start else "skipped_share"
                    break
                reason = self.model.make_room(space.tenant, SIZES[space], parent)
                if reason is not None:
                    break
                chunk = ModelChunk(space, key, SIZES[space], parent, reservation.chunks[len(fresh)])
                self.model.chunks.append(chunk)
                fresh.append(chunk)
            parent, kept = chunk, kept + 1
        skipped = len(prompt) - max(kept, start)
        if reason is not None:
            self.model.counters[reason] += skipped
        assert [chunk.twin for chunk in fresh] == list(reservation.chunks)
        assert (reservation.first, reservation.num_skipped) == (kept - len(fresh), skipped)
        there = [chunk for chunk in map(functools.partial(self.model.find, space), keys(prompt)) if chunk is not None]
        assert reservation.num_present == sum(chunk.visible for chunk in there[start : kept - len(fresh)])
        assert reservation.num_present + reservation.num_unsure == max(0, kept - start)
        if fresh:
            self.writing.append(fresh)
            if ending != "later":
                self.end_writing(len(self.writing) - 1, whole=True, dirty=ending == "dirty")

    @rule(pick=picks, whole=st.booleans(), dirty=st.booleans())
    def end_writing(self, pick: int, whole: bool, dirty: bool) -> None:
        if not self.writing:
            return
        chunks = self.writing.pop(pick % len(self.writing))
        before = {chunk for chunk in self.model.chunks if chunk.visible}
        self.model.end_writing(chunks, whole=whole, dirty=dirty)
        shown = {chunk.twin for chunk in self.model.chunks if chunk.visible and chunk not in before}
        twins = [chunk.twin for chunk in chunks]
        if not whole:
            self.index.abort(twins)
            assert not shown
            return
        said = self.index.commit(twins, dirty=dirty)
        assert set(said) == shown
        assert len(said) == len(shown)
        assert all(chunk.parent not in said[place:] for place, chunk in enumerate(said))

    @rule(space=spaces, prompt=prompts)
    def lookup(self, space: Space, prompt: str) -> None:
        last = self.index.lookup(space, keys(prompt))
        found = self.model.prefix(space, keys(prompt))
        assert [chunk.twin for chunk in found] == ([] if last is None else last.chain())

    @rule(pick=picks, keep=st.booleans())
    def use(self, pick: int, keep: bool) -> None:
        visible = [chunk for chunk in self.model.chunks if chunk.visible]
        if visible:
            self.pin(visible[pick % len(visible)])
            if not keep:
                self.unpin(-1)

    @rule(pick=picks)
    def pin_again(self, pick: int) -> None:
        if self.pinned:
            self.pin(self.pinned[pick % len(self.pinned)])

    def pin(self, chunk: ModelChunk) -> None:
        self.index.pin(chunk.twin)
        self.pinned.append(chunk)
        chunk.pins += 1
        self.model.use(chunk)

    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        if self.pinned:
            chunk = self.pinned.pop(pick % len(self.pinned))
            self.index.unpin(chunk.twin)
            chunk.pins -= 1
            self.model.use(chunk)
            self.model.settle()

    @rule(pick=picks, num=st.integers(1, 3))
    def clean(self, pick: int, num: int) -> None:
        dirty = [chunk for chunk in self.model.chunks if chunk.dirty]
        for chunk in dirty[pick % 4 :][:num]:
            chunk.dirty = False
            self.index.clean([chunk.twin])

    @rule(tenant=tenants)
    def evict(self, tenant: str | None) -> None:
        assert self.index.evict_one(tenant) == self.model.evict(tenant)

    @rule(pick=picks)
    def discard(self, pick: int) -> None:
        listed = [chunk for chunk in self.model.chunks if chunk.listed]
        if listed:
            root = listed[pick % len(listed)]
            assert self.index.discard(root.twin) == self.model.discard(root)
            assert self.index.discard(root.twin) == 0

    @rule(space=spaces)
    def discard_space(self, space: Space) -> None:
        roots = [chunk for chunk in self.model.chunks if chunk.listed and chunk.space == space and chunk.parent is None]
        assert self.index.discard_space(space) == sum(self.model.discard(root) for root in roots)

    @rule(space=spaces, prompt=prompts, last_use=st.integers(0, 1 << 48))
    def restore(self, space: Space, prompt: str, last_use: int) -> None:
        *before, key = keys(prompt)
        there = self.model.find(space, key)
        parent = self.model.find(space, before[-1]) if before else None
        lost = bool(before) and (parent is None or not parent.visible)
        last_use = last_use * 10_000 + len(self.model.chunks)  # no two alike
        fits = self.model.used() + SIZES[space] <= self.model.capacity
        chunk = self.index.restore(space, key, before[-1] if before else b"", SIZES[space], last_use)
        if there is not None:
            assert chunk is there.twin
        elif lost or not fits:
            assert chunk is None
        else:
            assert chunk is not None
            last_use -= 1 << 64
            twin = ModelChunk(space, key, SIZES[space], parent, chunk, last_use, writing=False, whole=True)
            self.model.chunks.append(twin)

    @rule(capacity=st.integers(0, CAPACITY))
    def shrink(self, capacity: int) -> None:
        """The pool becomes smaller for a moment."""
        self.pool.capacity_bytes = self.model.capacity = capacity
        before = self.model.counters["evicted"]
        while self.model.used("a") > LIMITS["a"] and self.model.evict("a"):
            pass
        while self.model.used() > capacity and self.model.evict(None):
            pass
        assert self.index.trim() == self.model.counters["evicted"] - before
        self.pool.capacity_bytes = self.model.capacity = CAPACITY

    @invariant()
    def both_keep_the_same(self) -> None:
        listed = [chunk for chunk in self.model.chunks if chunk.listed]
        assert len(self.index) == len(listed)
        for chunk in listed:
            assert self.index.find(chunk.space, chunk.key) is chunk.twin
            assert (chunk.twin.visible, chunk.twin.dirty) == (chunk.visible, chunk.dirty)
        assert set(self.index.dirty) == {chunk.twin for chunk in listed if chunk.dirty}
        assert self.index.dirty.nbytes == sum(chunk.nbytes for chunk in listed if chunk.dirty)

    @invariant()
    def every_place_is_given_back_once(self) -> None:
        held = {chunk.twin.offset for chunk in self.model.chunks if chunk.has_place}
        assert sorted(self.freed) == sorted({chunk.twin.offset for chunk in self.model.chunks} - held)
        assert self.pool.used_bytes == self.model.used()

    @invariant()
    def what_is_pinned_has_its_place(self) -> None:
        for last in self.pinned:
            links: list[Chunk] = last.twin.chain()
            assert not set(self.freed) & {chunk.offset for chunk in links}

    @invariant()
    def counters_agree(self) -> None:
        assert {name: getattr(self.index.counters, name) for name in COUNTERS} == {
            name: self.model.counters[name] for name in COUNTERS
        }


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
