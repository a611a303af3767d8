"""What a registration says of its engine."""

from __future__ import annotations

import pytest

from kvferry.errors import RequestError
from kvferry.layout import KVLayout, Plane
from kvferry.protocol.messages import Register
from kvferry.server.engines import MAX_PIECES, Geometry


def registration(chunk_tokens: int, planes: int = 256) -> Register:
    layout = KVLayout(
        format="token_pool",
        block_size=1,
        num_blocks=1 << 20,
        dtype="uint8",
        num_layers=planes,
        num_kv_heads=1,
        head_dim=1,
        planes=tuple(Plane(0, plane << 20, 1, 1) for plane in range(planes)),
    )
    return Register(1, "e", "m", 0, 1, chunk_tokens, "", layout, b"")


def test_a_chunk_in_too_many_pieces_is_refused() -> None:
    assert Geometry.of(registration(MAX_PIECES // 256)).chunk_bytes == MAX_PIECES
    with pytest.raises(RequestError, match=r"lies in 262400 pieces \(1025 blocks in 256 planes\).*smaller chunks"):
        Geometry.of(registration(MAX_PIECES // 256 + 1))
