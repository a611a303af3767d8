"""Planes: the one form in which every KV cache is copied, whichever engine made it.

A plane is a set of equal byte runs: block `b` of a plane lies at `offset + b * stride` in its storage and is `length`
bytes long. `derive_planes` finds the planes of a tensor from its axes alone; the engine formats (`engines.py`) only
give those axes their names.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvferry.errors import LayoutError
from kvferry.layout.keys import digest

BLOCK_AXIS = "B"
MAX_PLANES = 65_536
MAX_LAYER_NAMES = 4096
MAX_NAME_BYTES = 512
_MAX_BYTES = 1 << 62
_MAX_PAIRED = 4096  # planes that are compared one by one


class Axis(NamedTuple):
    """One axis of a tensor: a one-letter name, its size, and its stride in elements."""

    name: str
    size: int
    stride: int


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """Equal byte runs: block `b` lies at `offset + b * stride` of storage number `storage`. All in bytes."""

    storage: int
    offset: int
    stride: int
    length: int


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What the bytes of a registered KV cache mean.

    `block_size` is in tokens. `head_dim` and `num_kv_heads` are 0 where layers differ. `axis_order` tells the axes
    inside a block and their sizes, outermost first, as in "K2N16H8D64" (for each layer where layers differ). `isa`
    names the CPU instruction set where the engine packs its blocks by it. `layer_names` are the engine's names of the
    layers, in the order of the planes: those that share a tensor together.

    Raises LayoutError (a ValueError) where a field is out of range.
    """

    format: str
    block_size: int
    num_blocks: int
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    planes: Annotated[tuple[Plane, ...], Meta(max_length=MAX_PLANES)]
    axis_order: str = ""
    isa: str = ""
    layer_names: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "num_layers"):
            value = getattr(self, name)
            if not 0 < value < 1 << 31:
                raise LayoutError(f"{name} is {value}; it must be between 1 and 2**31 - 1")
        if min(self.num_kv_heads, self.head_dim) < 0:
            raise LayoutError(f"num_kv_heads {self.num_kv_heads} and head_dim {self.head_dim} must not be negative")
        if not 0 < len(self.planes) <= MAX_PLANES:
            raise LayoutError(f"{len(self.planes)} planes; a layout has 1 to {MAX_PLANES}")
        for plane in self.planes:
            _check_plane(plane, self.num_blocks)
        _check_names(self.layer_names)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return sum(plane.length for plane in self.planes)

    def fingerprint(self) -> bytes:
        """32 bytes that are equal only where KV of one cache has its meaning in another.

        Where the planes lie (storages, offsets, strides, number of blocks) does not count: it differs from one run of
        an engine to the next.
        """
        numbers = (self.block_size, self.num_layers, self.num_kv_heads, self.head_dim)
        lengths = [plane.length for plane in self.planes]
        parts = [
            b"kvferry.layout.2",
            *(text.encode() for text in (self.format, self.axis_order, self.dtype, self.isa)),
            struct.pack("<4Q", *numbers),
            struct.pack(f"<{len(lengths)}Q", *lengths),
            *(digest([name.encode() for name in names]) for names in self.layer_names),
        ]
        return digest(parts)

    def validate(self, storage_sizes: Sequence[int]) -> None:
        """Check that every block of every plane lies inside its storage and that no byte belongs to two.

        `storage_sizes` are in bytes, by storage number. Raises LayoutError.
        """
        by_storage: dict[int, list[Plane]] = {}
        for plane in self.planes:
            if plane.storage >= len(storage_sizes):
                raise LayoutError(f"a plane lies in storage {plane.storage}; there are {len(storage_sizes)} storages")
            end = plane.offset + (self.num_blocks - 1) * plane.stride + plane.length
            if end > storage_sizes[plane.storage]:
                raise LayoutError(
                    f"block {self.num_blocks - 1} of {plane} ends at byte {end}, "
                    f"beyond its storage of {storage_sizes[plane.storage]} bytes"
                )
            by_storage.setdefault(plane.storage, []).append(plane)
        for planes in by_storage.values():
            _check_disjoint(planes, self.num_blocks)


def derive_planes(
    axes: Sequence[Axis], *, storage: int = 0, offset: int = 0, itemsize: int = 1
) -> tuple[list[Plane], str]:
    """The planes of one tensor, outermost axis first, and its axes inside a block in memory order, as in "K2N16H8D64".

    `axes` are the tensor's, one of them named `B`; `offset` is the byte of the storage at which the tensor starts.
    Axes of size 1 have no place in memory and are left out. Raises LayoutError.
    """
    blocks = [axis for axis in axes if axis.name == BLOCK_AXIS]
    if len(blocks) != 1:
        raise LayoutError(f"axes {axes} have {len(blocks)} block axes; a KV cache has one")
    if any(axis.size < 1 or axis.stride < 0 for axis in axes) or itemsize < 1:
        raise LayoutError(f"axes {axes} of {itemsize}-byte elements: sizes start at 1 and strides at 0")
    inner = sorted((a for a in axes if a.name != BLOCK_AXIS and a.size > 1), key=lambda axis: axis.stride)
    dense = 1
    outer = list(inner)
    while outer and outer[0].stride == dense:
        dense *= outer.pop(0).size
    if outer and outer[0].stride < dense:
        raise LayoutError(f"axes {axes}: the elements of one block overlap in memory")
    outer.reverse()
    count = 1
    for axis in outer:
        count *= axis.size
    if count > MAX_PLANES:
        raise LayoutError(f"axes {axes}: one block lies in {count} separate runs, more than {MAX_PLANES}")
    steps = [[index * axis.stride * itemsize for index in range(axis.size)] for axis in outer]
    planes = [
        Plane(storage, offset + sum(step), blocks[0].stride * itemsize, dense * itemsize)
        for step in itertools.product(*steps)
    ]
    return planes, "".join(f"{axis.name}{axis.size}" for axis in reversed(inner))


def merge_planes(planes: Iterable[Plane]) -> tuple[Plane, ...]:
    """The same planes in the same order, with neighbours that touch in every block joined into one."""
    merged: list[Plane] = []
    for plane in planes:
        last = merged[-1] if merged else None
        if last is not None and _touch(last, plane):
            merged[-1] = Plane(last.storage, last.offset, last.stride, last.length + plane.length)
        else:
            merged.append(plane)
    return tuple(merged)


def _touch(first: Plane, second: Plane) -> bool:
    return (
        first.storage == second.storage
        and first.stride == second.stride
        and first.offset + first.length == second.offset
        and first.length + second.length <= first.stride
    )


def _check_plane(plane: Plane, num_blocks: int) -> None:
    if min(plane.storage, plane.offset, plane.stride) < 0 or plane.length < 1:
        raise LayoutError(f"{plane}: storage, offset and stride start at 0, length at 1")
    if plane.offset + num_blocks * plane.stride + plane.length >= _MAX_BYTES:
        raise LayoutError(f"{plane} with {num_blocks} blocks reaches beyond 2**62 bytes")
    if num_blocks > 1 and plane.length > plane.stride:
        raise LayoutError(f"{plane}: blocks of {plane.length} bytes every {plane.stride} bytes overlap")


def _check_names(layer_names: Sequence[Sequence[str]]) -> None:
    names = [name for shared in layer_names for name in shared]
    if len(names) > MAX_LAYER_NAMES:
        raise LayoutError(f"{len(names)} layer names; a layout has at most {MAX_LAYER_NAMES}")
    if not all(layer_names):
        raise LayoutError("a tensor without a name of its layer; give all of them names, or none")
    if len(set(names)) < len(names):
        raise LayoutError("a layer's name comes twice; each layer has one of its own")
    for name in names:
        try:
            size = len(name.encode())
        except UnicodeEncodeError as error:
            raise LayoutError(f"layer name {name!r} is not UTF-8: {error}") from None
        if size > MAX_NAME_BYTES:
            raise LayoutError(f"a layer's name of {size} bytes; at most {MAX_NAME_BYTES} are allowed")


def _check_disjoint(planes: Sequence[Plane], num_blocks: int) -> None:
    """Raise LayoutError where two planes of one storage share a byte, or interleave with different strides."""
    ordered = sorted(planes, key=lambda plane: plane.offset)
    table = np.array([(p.offset, p.stride, p.length) for p in ordered], dtype=np.int64)
    offsets, strides, lengths = table.T
    ends = offsets + (num_blocks - 1) * strides + lengths
    # A cluster is a stretch of planes whose footprints reach into one another; between clusters nothing can overlap.
    starts = np.flatnonzero(offsets[1:] >= np.maximum.accumulate(ends)[:-1]) + 1
    for rows in np.split(np.arange(len(ordered)), starts):
        if len(rows) < 2:
            continue
        if num_blocks > 1 and len(set(strides[rows].tolist())) > 1:
            raise LayoutError(
                f"planes {ordered[rows[0]]} and {ordered[rows[-1]]} interleave with different block strides; such a "
                "layout is not known"
            )
        if num_blocks == 1 or not _apart_on_circle(offsets[rows], lengths[rows], int(strides[rows[0]])):
            if len(rows) > _MAX_PAIRED:
                raise LayoutError(f"{len(rows)} planes interleave in a way that cannot be shown to keep them apart")
            _check_pairs([ordered[row] for row in rows], num_blocks)


def _sorted_apart(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> bool:
    return bool(np.all(starts[:-1] + lengths[:-1] <= starts[1:]))


def _apart_on_circle(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], stride: int) -> bool:
    """Whether the planes keep apart even if each had endless blocks."""
    places = starts % stride
    order = np.argsort(places, kind="stable")
    places, lengths = places[order], lengths[order]
    wraps = bool(places[-1] + lengths[-1] > places[0] + stride)
    return _sorted_apart(places, lengths) and not wraps


def _check_pairs(planes: Sequence[Plane], num_blocks: int) -> None:
    """The exact check, plane by plane, for planes of one stride in the order of their offsets."""
    offsets = np.array([plane.offset for plane in planes], dtype=np.int64)
    lengths = np.array([plane.length for plane in planes], dtype=np.int64)
    for index, plane in enumerate(planes[:-1]):
        stride = plane.stride if num_blocks > 1 else _MAX_BYTES
        blocks, rest = np.divmod(offsets[index + 1 :] - plane.offset, stride)
        # The other plane's block i meets this one's block i + blocks, or the one after that.
        same = (rest < plane.length) & (blocks < num_blocks)
        following = (stride - rest < lengths[index + 1 :]) & (blocks + 1 < num_blocks)
        hits = np.flatnonzero(same | following)
        if len(hits):
            raise LayoutError(f"{plane} and {planes[index + 1 + int(hits[0])]} overlap; each byte must be in one plane")
