"""The names of layers: KV is the same only where the layers have the same names, in the same order."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.errors import LayoutError
from kvferry.layout import KVLayout, TensorView, describe
from kvferry.layout.planes import MAX_LAYER_NAMES

SHAPE = (2, 4, 16, 2, 8)
STRIDE = (1024, 256, 16, 8, 1)


def view(storage: int) -> TensorView:
    return TensorView(storage, SHAPE, STRIDE, 0, 2, "bfloat16")


def named(names: str, storages: str) -> KVLayout:
    """One-letter layers over storages of one digit."""
    return describe("vllm_flash_attention", [view(int(storage)) for storage in storages], names=list(names))


def test_names_and_their_order_are_part_of_what_kv_is() -> None:
    prints = {
        layout.fingerprint()
        for layout in (
            named("ab", "01"),
            named("ba", "01"),
            named("ac", "01"),
            named("abc", "011"),  # layers that share a tensor: which of them do
            named("abc", "001"),
            describe("vllm_flash_attention", [view(0), view(1)]),
            describe("vllm_flash_attention", [view(0), view(1)], names=["ab", ""]),
            describe("vllm_flash_attention", [view(0), view(1)], names=["", "ab"]),
        )
    }
    assert len(prints) == 8
    assert named("ab", "01").fingerprint() == named("ab", "10").fingerprint()  # the number of a storage is a place
    assert named("abc", "001").layer_names == (("a", "b"), ("c",))


def test_the_fingerprint_with_names_is_fixed() -> None:
    assert named("ab", "01").fingerprint().hex() == "79c8be3c5629819af8dd5a4755cf1fddc98734f304ae84f94020dc553eb16d24"


def test_names_travel() -> None:
    layout = named("abc", "001")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout) == layout


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((("x" * 513,),), "513 bytes"),
        ((("é" * 257,),), "514 bytes"),
        ((("\ud800",),), "UTF-8"),
        (((),), "without a name"),
        ((("a",), ("a",)), "twice"),
        ((tuple(map(str, range(MAX_LAYER_NAMES + 1))),), str(MAX_LAYER_NAMES)),
    ],
)
def test_names_have_bounds(names: tuple[tuple[str, ...], ...], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        msgspec.structs.replace(named("a", "0"), layer_names=names)


def test_every_tensor_has_a_name_or_none_has() -> None:
    with pytest.raises(LayoutError, match="1 names for 2 tensors"):
        describe("vllm_flash_attention", [view(0), view(1)], names=["a"])
