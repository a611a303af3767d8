"""Any length, any block size: whole chunks are kept, and no block outside what was asked for is written (C11)."""

from __future__ import annotations

import pytest

from kvferry.errors import RequestError
from kvferry.layout import KVLayout, Plane, chunk_tokens_for
from kvferry.protocol.messages import Register
from kvferry.server.engines import Geometry
from serving.process import Stage

NUM_BLOCKS = 80


def test_prompts_of_any_length(stage: Stage) -> None:
    engine = stage.engine(block_size=32, num_blocks=NUM_BLOCKS)
    stage.wait_for_memory(engine)
    for seed, num_tokens in enumerate((0, 1, 63, 64, 65, 127, 128, 32 * 68)):
        chunks, blocks = num_tokens // 64, -(-num_tokens // 32)
        used = list(range(NUM_BLOCKS - blocks, NUM_BLOCKS))
        want = engine.call("fill", blocks=used, seed=seed)["digest"][: 2 * chunks]
        stored = engine.call("store", seed=seed, num_tokens=num_tokens, blocks=used)
        assert stored == {"stored": chunks, "present": 0, "skipped": 0}
        found = engine.call("lookup", seed=seed, num_tokens=num_tokens, request=f"{seed}")
        assert found["tokens"] == 64 * chunks
        engine.call("wipe", value=-7.5)
        blank = engine.call("digest", blocks=[0])["digest"]
        if chunks:
            assert engine.call("retrieve", lease=found["lease"], blocks=used)["failed"] == []
        held = engine.call("digest", blocks=list(range(NUM_BLOCKS)))["digest"]
        first = used[0] if used else NUM_BLOCKS
        assert held[first : first + 2 * chunks] == want
        assert held[:first] + held[first + 2 * chunks :] == blank * (NUM_BLOCKS - 2 * chunks)


@pytest.mark.parametrize("block_size", [400, 544, 640])
def test_blocks_that_are_larger_than_a_chunk_would_be(stage: Stage, block_size: int) -> None:
    engine = stage.engine(block_size=block_size, num_blocks=4)
    stage.wait_for_memory(engine)
    want = engine.call("fill", blocks=[2, 0], seed=1)["digest"]
    num_tokens = 2 * block_size + 17
    assert engine.call("store", seed=1, num_tokens=num_tokens, blocks=[2, 0, 1])["stored"] == 2
    engine.call("wipe")
    blank = engine.call("digest", blocks=[2])["digest"]
    found = engine.call("lookup", seed=1, num_tokens=num_tokens)
    assert found["tokens"] == 2 * block_size
    assert engine.call("retrieve", lease=found["lease"], blocks=[1, 3, 0])["failed"] == []
    assert engine.call("digest", blocks=[1, 3, 0, 2])["digest"] == want + blank * 2


def test_a_chunk_is_a_whole_number_of_blocks() -> None:
    layout = KVLayout(
        format="f", block_size=400, num_blocks=8, dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1,
        planes=(Plane(0, 0, 1600, 1600),),
    )  # fmt: skip
    assert chunk_tokens_for(400, 256) == 400
    Geometry.of(Register(1, "e", "m", 0, 1, 800, "", layout, b""))
    with pytest.raises(RequestError, match="256 tokens is no multiple of blocks of 400"):
        Geometry.of(Register(1, "e", "m", 0, 1, 256, "", layout, b""))
