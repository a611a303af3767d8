"""Planes derived from shapes and strides, and what a layout refuses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.layout.planes import MAX_PLANES, Axis, KVLayout, Plane, derive_planes, merge_planes


def layout_of(planes: list[Plane], num_blocks: int = 4) -> KVLayout:
    return KVLayout(
        format="test",
        block_size=16,
        num_blocks=num_blocks,
        dtype="uint8",
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        planes=tuple(planes),
    )


def strides_for(sizes: list[int], order: list[int], padding: list[int]) -> list[int]:
    """Strides that lay the axes out in `order` (innermost first), each followed by some padding."""
    strides = [0] * len(sizes)
    step = 1
    for axis in order:
        strides[axis] = step
        step = step * sizes[axis] + padding[axis] * step
    return strides


@st.composite
def axes(draw: st.DrawFn) -> list[Axis]:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(sizes))))
    padding = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=len(sizes), max_size=len(sizes)))
    strides = strides_for(sizes, order, padding)
    block = draw(st.integers(0, len(sizes) - 1))
    names = ["B" if index == block else "KLNHD"[index] for index in range(len(sizes))]
    return [Axis(*axis) for axis in zip(names, sizes, strides, strict=True)]


@settings(deadline=None)
@given(axes(), st.integers(1, 4), st.integers(0, 100))
def test_planes_hold_exactly_the_bytes_of_each_block(axes: list[Axis], itemsize: int, offset: int) -> None:
    planes, _ = derive_planes(axes, storage=3, offset=offset, itemsize=itemsize)
    block_axis = next(axis for axis in axes if axis.name == "B")
    for block in range(block_axis.size):
        ranges = [range(block, block + 1) if axis is block_axis else range(axis.size) for axis in axes]
        elements = [
            sum(at * axis.stride for at, axis in zip(index, axes, strict=True)) for index in itertools.product(*ranges)
        ]
        expected = sorted(offset + element * itemsize + byte for element in elements for byte in range(itemsize))
        found = [plane.offset + block * plane.stride + byte for plane in planes for byte in range(plane.length)]
        assert sorted(found) == expected
    assert {plane.storage for plane in planes} == {3}


@settings(deadline=None)
@given(axes(), st.integers(1, 4))
def test_derived_planes_validate_against_the_exact_size(axes: list[Axis], itemsize: int) -> None:
    planes, _ = derive_planes(axes, itemsize=itemsize)
    num_blocks = next(axis.size for axis in axes if axis.name == "B")
    layout = layout_of(list(merge_planes(planes)), num_blocks)
    size = (sum((axis.size - 1) * axis.stride for axis in axes) + 1) * itemsize
    layout.validate([size])
    with pytest.raises(LayoutError, match="beyond its storage"):
        layout.validate([size - 1])
    assert layout.block_bytes == sum(plane.length for plane in planes)


small_planes = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 4)).map(lambda pair: Plane(0, pair[0], 7, pair[1])),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(small_planes, st.integers(1, 4))
def test_overlap_is_found_exactly(planes: list[Plane], num_blocks: int) -> None:
    places = [
        plane.offset + block * plane.stride + byte
        for plane in planes
        for block in range(num_blocks)
        for byte in range(plane.length)
    ]
    overlap = len(set(places)) < len(places)
    try:
        layout_of(planes, num_blocks).validate([1000])
    except LayoutError:
        assert overlap
    else:
        assert not overlap


def test_other_storages_never_overlap_but_have_to_exist() -> None:
    layout = layout_of([Plane(0, 0, 8, 8), Plane(1, 0, 8, 8)])
    layout.validate([32, 32])
    with pytest.raises(LayoutError, match="storage 1; there are 1 storages"):
        layout.validate([32])


def test_interleaving_with_different_strides_is_refused() -> None:
    with pytest.raises(LayoutError, match="different block strides"):
        layout_of([Plane(0, 0, 16, 4), Plane(0, 8, 32, 4)]).validate([1000])


def test_neighbours_merge_only_where_they_touch_in_every_block() -> None:
    whole = [Plane(0, 0, 32, 8), Plane(0, 8, 32, 8), Plane(0, 16, 32, 16)]
    assert merge_planes(whole) == (Plane(0, 0, 32, 32),)
    assert len(merge_planes([Plane(0, 0, 8, 8), Plane(0, 8, 8, 8)])) == 2
    assert len(merge_planes([Plane(0, 0, 32, 8), Plane(1, 8, 32, 8)])) == 2
    assert len(merge_planes([Plane(0, 8, 32, 8), Plane(0, 0, 32, 8)])) == 2


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ([Axis("N", 4, 1)], "0 block axes"),
        ([Axis("B", 4, 1), Axis("B", 4, 4)], "2 block axes"),
        ([Axis("B", 4, 8), Axis("N", 4, 0)], "overlap"),
        ([Axis("B", 4, 8), Axis("N", 4, 1), Axis("H", 2, 3)], "overlap"),
        ([Axis("B", 0, 8), Axis("N", 4, 1)], "start at 1"),
        ([Axis("B", 2, 1 << 40), Axis("N", MAX_PLANES + 1, 2)], "separate runs"),
    ],
)
def test_axes_that_are_no_cache(axes: list[Axis], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        derive_planes(axes)


@pytest.mark.parametrize(
    ("planes", "text"),
    [
        ([], "0 planes"),
        ([Plane(0, -1, 8, 8)], "start at 0"),
        ([Plane(0, 0, 8, 0)], "length at 1"),
        ([Plane(0, 0, 8, 9)], "overlap"),
        ([Plane(0, 1 << 62, 8, 8)], "2\\*\\*62"),
    ],
)
def test_planes_out_of_range(planes: list[Plane], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        layout_of(planes)


def test_num_blocks_out_of_range() -> None:
    with pytest.raises(LayoutError, match="num_blocks is 0"):
        layout_of([Plane(0, 0, 8, 8)], 0)
