"""Random layouts and blocks for the tests of copies: one case holds memory, a layout over it, and block ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.copy.oracle import Bytes
from kvferry.layout import KVLayout, Plane

UNTOUCHED = 0xEE


def layout_of(planes: list[Plane], num_blocks: int) -> KVLayout:
    return KVLayout(
        format="test",
        block_size=1,
        num_blocks=num_blocks,
        dtype="uint8",
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        planes=tuple(planes),
    )


@dataclass(frozen=True)
class Case:
    """A paged cache: its layout and the size of each storage, chunks of `per_chunk` of the blocks `ids`."""

    layout: KVLayout
    storage_bytes: tuple[int, ...]
    ids: list[int]
    num_chunks: int

    @property
    def per_chunk(self) -> int:
        return len(self.ids) // self.num_chunks

    @property
    def chunk_bytes(self) -> int:
        return self.per_chunk * self.layout.block_bytes

    def random_storages(self, seed: int) -> list[Bytes]:
        rng = np.random.default_rng(seed)
        return [rng.integers(0, 256, size, dtype=np.uint8) for size in self.storage_bytes]

    def random_chunks(self, seed: int) -> list[Bytes]:
        rng = np.random.default_rng(seed)
        return [rng.integers(0, 256, self.chunk_bytes, dtype=np.uint8) for _ in range(self.num_chunks)]


def make_case(
    lengths: list[int], *, num_blocks: int, per_chunk: int, num_chunks: int, pad: int = 0, seed: int = 0
) -> Case:
    """Planes of these lengths with `pad` bytes after each block; even planes in storage 0, odd ones in storage 1."""
    ends = [pad, pad]
    planes = []
    for index, length in enumerate(lengths):
        storage = index % 2
        planes.append(Plane(storage, ends[storage], length + pad, length))
        ends[storage] += num_blocks * (length + pad)
    layout = layout_of(planes, num_blocks)
    layout.validate(ends)
    ids = np.random.default_rng(seed).permutation(num_blocks)[: per_chunk * num_chunks].tolist()
    return Case(layout, tuple(ends), ids, num_chunks)


CASES = {
    "bytes_1": make_case([1], num_blocks=50, per_chunk=4, num_chunks=5),
    "bytes_3_and_12": make_case([3, 12], num_blocks=40, per_chunk=3, num_chunks=4, pad=5),
    "bytes_100_unaligned": make_case([100, 100, 36], num_blocks=64, per_chunk=4, num_chunks=10, pad=1),
    "bytes_4_aligned": make_case([4, 20], num_blocks=64, per_chunk=4, num_chunks=10, pad=4),
    "pages_dense": make_case([4096] * 8, num_blocks=64, per_chunk=4, num_chunks=8),
    "pages_padded": make_case([4096, 576], num_blocks=64, per_chunk=2, num_chunks=16, pad=48),
    "mixed_widths": make_case([64 * 576, 64 * 132], num_blocks=20, per_chunk=1, num_chunks=12),
    "big_blocks": make_case([1_000_003], num_blocks=6, per_chunk=1, num_chunks=4),
}
