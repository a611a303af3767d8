"""Which bytes of a block two engines have in common, however each of them lays its blocks out. Pure arithmetic.

The *image* of a block is all its bytes in the order of its axes, outermost first; it lies in memory as one run after
the other, the planes. A *piece* is a run of the image that both sides have in one run, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvferry.errors import LayoutError
from kvferry.layout import KVLayout, Plane
from kvferry.p2p.signal.messages import About, Geometry, LayerGeometry

HEADS = "H"
MAX_PIECES = 65_536


class Piece(NamedTuple):
    """`length` bytes at `start` of plane number `plane`."""

    plane: int
    start: int
    length: int


class Span(NamedTuple):
    """Heads `first` to `end` of those that a rank has; None for all that there is."""

    first: int
    end: int


class Shares(NamedTuple):
    """The heads that two ranks have in common, as each of them numbers its own; None where they are all."""

    mine: Span | None
    theirs: Span | None


def shared_heads(mine: About, theirs: About) -> Shares:
    """Which heads the two ranks share. Raises LayoutError, which names both sizes, where that cannot be told."""
    own, other = _geometry(mine), _geometry(theirs)
    if not (own.num_kv_heads or other.num_kv_heads or _has_heads(own) or _has_heads(other)):
        return Shares(None, None)  # every rank has the same KV
    sizes = f"tensor-parallel rank {mine.tp_rank} of {mine.tp_size} and rank {theirs.tp_rank} of {theirs.tp_size}"
    if mine.tp_size == theirs.tp_size:
        if mine.tp_rank != theirs.tp_rank:
            raise LayoutError(f"{sizes} hold other heads; ranks of one number go together")
        return Shares(None, None)
    heads = f"{own.num_kv_heads} and {other.num_kv_heads} KV heads a rank"
    if not own.num_kv_heads or own.num_kv_heads * mine.tp_size != other.num_kv_heads * theirs.tp_size:
        raise LayoutError(f"{sizes} with {heads} do not split the same heads: such pairs of sizes are not supported")
    own_first, other_first = mine.tp_rank * own.num_kv_heads, theirs.tp_rank * other.num_kv_heads
    first = max(own_first, other_first)
    end = min(own_first + own.num_kv_heads, other_first + other.num_kv_heads)
    if first >= end:
        raise LayoutError(f"{sizes} with {heads} have no head in common")
    return Shares(Span(first - own_first, end - own_first), Span(first - other_first, end - other_first))


def common_pieces(mine: LayerGeometry, theirs: LayerGeometry, shares: Shares) -> tuple[Piece, ...]:
    """The pieces of one layer's block on my side; the other side has as many of the same lengths, in the same order.

    Raises LayoutError where the two layers do not hold the same bytes in the same order.
    """
    own, other = _axes(mine, shares.mine), _axes(theirs, shares.theirs)
    same = (own == other and mine.itemsize == theirs.itemsize) and mine.dtype == theirs.dtype
    if not same:
        raise LayoutError(
            f"blocks of {mine.axes} {mine.dtype} and of {theirs.axes} {theirs.dtype} do not hold the same bytes in the "
            "same order"
        )
    ends = sorted(set(_ends(_pieces(mine, shares.mine))) | set(_ends(_pieces(theirs, shares.theirs))))
    if len(ends) > MAX_PIECES:
        raise LayoutError(f"a block of {mine.axes} lies in {len(ends)} separate runs, more than {MAX_PIECES}")
    return tuple(_cut(_pieces(mine, shares.mine), ends))


def planes_of(layer: KVLayout, pieces: Iterable[Piece]) -> tuple[Plane, ...]:
    """The pieces of one layer's blocks as planes of its storages."""
    own = layer.planes
    return tuple(Plane(own[at].storage, own[at].offset + start, own[at].stride, size) for at, start, size in pieces)


def check_compatible(mine: About, theirs: About) -> None:
    """Raise LayoutError, naming both values, where blocks cannot go from one to the other."""
    if mine.geometry is None or theirs.geometry is None:
        return  # tensors can
    own, other = mine.geometry, theirs.geometry
    sizes = (own.block_size, len(own.layers)), (other.block_size, len(other.layers))
    if sizes[0] != sizes[1]:
        raise LayoutError("blocks of {} tokens and {} layers here, {} and {} there".format(*sizes[0], *sizes[1]))
    for here, there in zip(own.names, other.names, strict=True):
        if here != there:
            raise LayoutError(f"layer {here!r} here, {there!r} there; both engines name the same layers in one order")
    shares = shared_heads(mine, theirs)
    for pair in set(zip(own.layers, other.layers, strict=True)):
        common_pieces(own.kinds[pair[0]], other.kinds[pair[1]], shares)


def check_geometry(geometry: Geometry) -> None:
    """Raise LayoutError where a peer's geometry contradicts itself."""
    if len(geometry.names) != len(geometry.layers) or max(geometry.layers) >= len(geometry.kinds):
        raise LayoutError("names, layers and kinds of a geometry do not go together")
    for kind in geometry.kinds:
        sizes = [size for _, size in _parse(kind.axes)]
        if math.prod(sizes) * kind.itemsize != sum(kind.lengths):
            raise LayoutError(f"axes {kind.axes} of {kind.itemsize} bytes in runs of {sum(kind.lengths)} bytes")


def _geometry(about: About) -> Geometry:
    if about.geometry is None:
        raise LayoutError(f"the engine at {about.address} has registered no KV caches; call register_kv_caches first")
    return about.geometry


def _has_heads(geometry: Geometry) -> bool:
    return any(name == HEADS for kind in geometry.kinds for name, _ in _parse(kind.axes))


def _parse(axes: str) -> list[tuple[str, int]]:
    found = re.findall(r"([A-Z])([0-9]{1,12})", axes)
    if "".join(name + size for name, size in found) != axes or any(int(size) < 1 for _, size in found):
        raise LayoutError(f"axes {axes!r}; expected letters with sizes, as in K2N16H8D64")
    return [(name, int(size)) for name, size in found]


def _axes(layer: LayerGeometry, span: Span | None) -> list[tuple[str, int]]:
    """The axes with the heads of the span alone; axes of size 1 do not count."""
    sizes = [(name, span.end - span.first if name == HEADS and span else size) for name, size in _parse(layer.axes)]
    return [(name, size) for name, size in sizes if size > 1]


def _pieces(layer: LayerGeometry, span: Span | None) -> Iterator[Piece]:
    """The planes, or the parts of them that hold the heads of the span, in the order of the image."""
    runs = _head_runs(layer, span)
    start, end = next(runs)
    at = 0
    for plane, length in enumerate(layer.lengths):
        while start < at + length:
            stop = min(end, at + length)
            yield Piece(plane, start - at, stop - start)
            start = stop
            if start == end:
                start, end = next(runs, (sum(layer.lengths), 0))
        at += length


def _head_runs(layer: LayerGeometry, span: Span | None) -> Iterator[tuple[int, int]]:
    """Where in the image the heads of the span lie, from byte to byte."""
    sizes = _parse(layer.axes)
    places = [index for index, (name, _) in enumerate(sizes) if name == HEADS]
    if span is None or not places:
        yield 0, sum(layer.lengths)
        return
    if len(places) > 1 or span.end > sizes[places[0]][1]:
        raise LayoutError(f"axes {layer.axes} do not have heads {span.first} to {span.end}")
    inner = math.prod(size for _, size in sizes[places[0] + 1 :]) * layer.itemsize
    outer = math.prod(size for _, size in sizes[: places[0]])
    if outer > MAX_PIECES:
        raise LayoutError(f"the heads of {layer.axes} lie in {outer} separate runs, more than {MAX_PIECES}")
    step = sizes[places[0]][1] * inner
    for index in range(outer):
        yield index * step + span.first * inner, index * step + span.end * inner


def _ends(pieces: Iterable[Piece]) -> Iterator[int]:
    total = 0
    for piece in pieces:
        total += piece.length
        yield total


def _cut(pieces: Iterable[Piece], ends: Sequence[int]) -> Iterator[Piece]:
    """The same bytes in pieces that end where `ends` says."""
    marks = iter(ends)
    mark = next(marks)
    at = 0
    for plane, start, length in pieces:
        done = 0
        while done < length:
            step = min(length - done, mark - at)
            yield Piece(plane, start + done, step)
            done += step
            at += step
            if at == mark:
                mark = next(marks, mark)
