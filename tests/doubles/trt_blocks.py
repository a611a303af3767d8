"""The blocks of a `FakeTrtExecutor`: bytes that tell which tokens they are of, an allocator, a tree for reuse."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

POISON = 0x2BAD
_HASH_BYTES = 8
Hashes = npt.NDArray[np.uint64]


class RuleBroken(AssertionError):
    """The connector has done what TensorRT-LLM does not allow, or what would break it."""


class WrongKV(AssertionError):
    """A forward reads KV that is not that of its tokens."""


@dataclass(frozen=True)
class PoolShape:
    """Of one rank's pool `[blocks, layers, factor, heads * tokens * dim]`, heads outside tokens."""

    blocks: int = 24
    layers: int = 2
    factor: int = 2
    heads: int = 2
    tokens: int = 32
    dim: int = 4

    @property
    def width(self) -> int:
        return self.heads * self.tokens * self.dim


def chain(tokens: Sequence[int], variant: str) -> Hashes:
    """For each token a number that depends on it, on all before it, and on `variant`."""
    last, found = variant.encode(), []
    for token in tokens:
        last = hashlib.blake2b(last + int(token).to_bytes(4, "little"), digest_size=_HASH_BYTES).digest()
        found.append(last)
    return np.frombuffer(b"".join(found), dtype=np.uint64)


class Memory:
    """One rank's pool, whose elements are written and read as integers of 16 bits."""

    def __init__(self, pool: torch.Tensor, shape: PoolShape, rank: int) -> None:
        self.pool = pool
        self._shape = shape
        self._rank = rank

    @property
    def numbers(self) -> torch.Tensor:
        """`[blocks, layers, factor, heads, tokens, dim]`; a view of the pool, wherever that is by now."""
        shape = self._shape
        whole = self.pool.view(torch.int16)
        return whole.view(shape.blocks, shape.layers, shape.factor, shape.heads, shape.tokens, shape.dim)

    def kv(self, hashes: Hashes, layer: int) -> torch.Tensor:
        """`[tokens, factor, heads, dim]` of the tokens with these numbers."""
        shape = self._shape
        count = shape.factor * shape.heads * shape.dim
        mixed = hashes ^ np.uint64((layer * 0x9E3779B97F4A7C15 + self._rank * 0xC2B2AE3D27D4EB4F) % 2**64)
        steps = np.arange(count, dtype=np.uint64) * np.uint64(2654435761)
        values = (steps[None, :] + (mixed % np.uint64(2**62))[:, None]) % np.uint64(32749)
        return torch.from_numpy(values.astype(np.int16)).view(-1, shape.factor, shape.heads, shape.dim)

    def write(self, blocks: Sequence[int], hashes: Hashes, start: int, layer: int, *, slow_cycles: int = 0) -> None:
        """Write a layer's KV of the tokens from `start` on; on a GPU, once so many cycles have passed on its stream."""
        numbers = self.numbers
        rows, places = self._places(blocks, range(start, len(hashes)))
        values = self.kv(hashes[start:], layer).to(numbers.device)
        if slow_cycles and numbers.is_cuda:
            torch.cuda._sleep(slow_cycles)  # type: ignore[no-untyped-call]
        numbers[rows, layer, :, :, places] = values

    def check(self, blocks: Sequence[int], hashes: Hashes, end: int, layer: int) -> None:
        """Raise WrongKV unless a layer's blocks hold the KV of the first `end` tokens.

        Blocks without a page, which are at the start, are not looked at.
        """
        begin = min(end, sum(block < 0 for block in blocks) * self._shape.tokens)
        rows, places = self._places(blocks, range(begin, end))
        found = self.numbers[rows, layer, :, :, places].cpu()
        wrong = (found != self.kv(hashes[begin:end], layer)).flatten(1).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            what = "poison" if bool((found[wrong[0]] == POISON).all()) else "other KV"
            at = begin + wrong[0]
            raise WrongKV(
                f"rank {self._rank}, layer {layer}: token {at}, block {blocks[at // self._shape.tokens]}: {what}"
            )

    def _places(self, blocks: Sequence[int], tokens: range) -> tuple[torch.Tensor, torch.Tensor]:
        """For each token its block, and its place in it."""
        rows = [blocks[token // self._shape.tokens] for token in tokens]
        device = self.pool.device
        places = torch.arange(tokens.start, tokens.stop, device=device) % self._shape.tokens
        return torch.tensor(rows, dtype=torch.long, device=device), places

    def poison(self, block: int) -> None:
        self.numbers[block] = POISON

    def copy(self, source: int, target: int) -> None:
        self.numbers[target] = self.numbers[source]

    def snapshot(self) -> torch.Tensor:
        """What each block holds, a row a block."""
        return self.numbers.cpu().reshape(self._shape.blocks, -1).clone()


class BlockManager:
    """Blocks of all ranks, which have the same tables. What is freed is poisoned, and given out again first.

    With `keeps`, whole blocks of requests that have ended can be reused locally, until their room is needed.
    """

    def __init__(self, memories: Sequence[Memory], shape: PoolShape, *, keeps: bool, partial: bool) -> None:
        self._memories = memories
        self._shape = shape
        self._keeps = keeps
        self._partial = partial
        self._free = list(range(shape.blocks))
        self._users = [0] * shape.blocks
        self._tree: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self._unpoisoned: list[int] = []
        for block in self._free:
            self._poison(block)

    @property
    def free(self) -> set[int]:
        """Blocks that nobody has; nothing may write to them."""
        return set(self._free)

    def num_available(self) -> int:
        return len(self._free) + sum(not self._users[block] for block in self._tree.values())

    def match(self, tokens: Sequence[int], variant: str) -> tuple[list[int], int]:
        """Blocks of the longest prefix that is here, one of which may be there in part; how many tokens that is."""
        size, blocks = self._shape.tokens, list[int]()
        while (len(blocks) + 1) * size < len(tokens):
            block = self._tree.get(self._key(tokens[: (len(blocks) + 1) * size], variant))
            if block is None:
                break
            blocks.append(block)
        for block in blocks:
            self._users[block] += 1
        start = len(blocks) * size
        more, source = self._part(tokens[:-1], start, variant) if self._partial else (0, -1)
        if more and self.num_available() > (not self._users[source]):
            self._users[source] += 1  # which allocating must not evict
            (copy,) = self.allocate(1)
            self._users[source] -= 1
            for memory in self._memories:
                memory.copy(source, copy)
            return [*blocks, copy], start + more
        return blocks, start

    def allocate(self, count: int) -> list[int]:
        """New blocks, the last that were freed first."""
        while len(self._free) < count:
            key = next(key for key, block in self._tree.items() if not self._users[block])
            self._give_back(self._tree.pop(key))
        found = [self._free.pop() for _ in range(count)]
        for block in found:
            self._users[block] = 1
        return found

    def release(
        self, blocks: Iterable[int], tokens: Sequence[int] = (), variant: str = "", *, at_once: bool = True
    ) -> None:
        """Give blocks back; whole ones of `tokens`, whose KV is in them, are kept for reuse where that is done.

        Unless `at_once`, they are left as they are until `poison_freed`.
        """
        size = self._shape.tokens
        for index, block in enumerate(blocks):
            if block < 0:
                continue
            self._users[block] -= 1
            key = self._key(tokens[: (index + 1) * size], variant)
            if self._keeps and (index + 1) * size <= len(tokens) and key not in self._tree:
                self._tree[key] = block
            elif not self._users[block] and block not in self._tree.values():
                self._give_back(block, at_once=at_once or self._partial)

    def poison_freed(self) -> None:
        """A forward begins, which may write to whatever was freed."""
        for block in self._unpoisoned:
            if not self._users[block]:
                self._poison(block)
        self._unpoisoned = []

    def _part(self, tokens: Sequence[int], start: int, variant: str) -> tuple[int, int]:
        """How many tokens of the next block another block has, and which."""
        best = (0, -1)
        for (held, kind), block in self._tree.items():
            if kind == variant and len(held) == start + self._shape.tokens and held[:start] == tuple(tokens[:start]):
                same = 0
                for one, other in zip(held[start:], tokens[start:], strict=False):
                    if one != other:
                        break
                    same += 1
                best = max(best, (same, block))
        return best if best[0] < self._shape.tokens else (0, -1)

    def _give_back(self, block: int, *, at_once: bool = True) -> None:
        if at_once:
            self._poison(block)
        else:
            self._unpoisoned.append(block)
        self._free.append(block)

    def _poison(self, block: int) -> None:
        for memory in self._memories:
            memory.poison(block)

    @staticmethod
    def _key(tokens: Sequence[int], variant: str) -> tuple[Any, ...]:
        return (tuple(tokens), variant)


class Watch:
    """Sees which blocks are written to between two looks."""

    def __init__(self, memories: Sequence[Memory], blocks: BlockManager) -> None:
        self._memories = memories
        self._blocks = blocks
        self._seen: list[torch.Tensor] = []
        self.note()

    def note(self) -> None:
        """All is as it should be."""
        self._seen = [memory.snapshot() for memory in self._memories]

    def check(self, when: str, allowed: frozenset[int]) -> None:
        """Raise where another block than those has changed since the last look."""
        for rank, memory in enumerate(self._memories):
            found = memory.snapshot()
            changed = (found != self._seen[rank]).any(dim=1).nonzero().flatten().tolist()
            wrong = sorted(set(changed) - allowed)
            if wrong:
                free = sorted(self._blocks.free)
                raise RuleBroken(f"{when}: rank {rank}: blocks {wrong} were written to; free are {free}")
            self._seen[rank] = found
