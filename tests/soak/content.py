"""KV whose every byte follows from its chunk's key and its layout, so that any wrong KV is seen, and named."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
PLANES = 4  # two layers, K and V
_TAG = np.dtype([("key", "V16"), ("layout", "<u4"), ("block", "<u2"), ("plane", "<u2")])


class Content:
    """The bytes of the chunks of one layout: a stream seeded by the key, and at the start of each row whose row it is.

    A row is one plane of one block.
    """

    def __init__(self, layout: int, blocks_a_chunk: int, row_bytes: int) -> None:
        self.layout = layout
        self.blocks_a_chunk = blocks_a_chunk
        self._shape = (blocks_a_chunk, PLANES, row_bytes)
        self._tags = np.zeros(self._shape[:2], dtype=_TAG)
        self._tags["layout"] = layout
        self._tags["block"] = np.arange(blocks_a_chunk)[:, None]
        self._tags["plane"] = np.arange(PLANES)[None, :]

    def chunk(self, key: bytes) -> Bytes:
        """What the chunk of that key holds: blocks x planes x bytes of a row."""
        words = np.prod(self._shape) // 8
        seed = int.from_bytes(key[:24], "little") ^ self.layout
        rows = np.random.SFC64(seed).random_raw(int(words)).view(np.uint8).reshape(self._shape)
        tags = self._tags.copy()
        tags["key"] = np.void(key[:16])
        rows[:, :, : _TAG.itemsize] = tags.view(np.uint8).reshape(*self._shape[:2], _TAG.itemsize)
        return rows

    def differences(self, key: bytes, held: Bytes, which: Sequence[bool]) -> list[dict[str, Any]]:
        """For each wrong block, of those in `which`: the first wrong byte, and what the row says that it is."""
        wanted = self.chunk(key)
        if np.array_equal(wanted, held):
            return []
        found = []
        for block in range(self.blocks_a_chunk):
            wrong = wanted[block] != held[block]
            if not which[block] or not wrong.any():
                continue
            plane, byte = (int(axis[0]) for axis in np.nonzero(wrong))
            seems = describe_row(held[block, plane])
            facts = {"nth": block, "plane": plane, "first_byte": byte, "wrong_bytes": int(wrong.sum()), "holds": seems}
            found.append(facts)
        return found


def describe_row(row: Bytes) -> str:
    """Whose a row says it is."""
    key, layout, block, plane = struct.unpack_from("<16sIHH", row.tobytes())
    if len(set(row[:32].tolist())) == 1:
        return f"only bytes {row[0]:#04x}"
    return f"key {key.hex()}.. layout {layout} block {block} plane {plane}, or nothing that was ever written"


class PagedBytes:
    """A registered KV cache as bytes: planes x blocks x bytes of a row."""

    def __init__(self, layers: Sequence[torch.Tensor], num_blocks: int) -> None:
        flat = torch.empty(0, dtype=torch.uint8).set_(layers[0].untyped_storage())
        self._rows: Bytes = flat.numpy().reshape(PLANES, num_blocks, -1)

    def write(self, blocks: Sequence[int], content: Bytes) -> None:
        """`content`: blocks x planes x bytes."""
        self._rows[:, blocks] = content.transpose(1, 0, 2)

    def read(self, blocks: Sequence[int]) -> Bytes:
        """A copy, as `write` takes it."""
        held: Bytes = self._rows[:, blocks].transpose(1, 0, 2)
        return held

    def mark(self, blocks: Sequence[int], value: int) -> None:
        """Make all bytes `value`."""
        self._rows[:, blocks] = value

    def unmarked(self, blocks: Sequence[int], value: int) -> list[int]:
        """Those of `blocks` that hold anything but `value`."""
        return [block for block in blocks if not (self._rows[:, block] == value).all()]
