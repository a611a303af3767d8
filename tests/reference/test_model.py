"""The model against a plain twin without pages, and what its tokens depend on."""

from __future__ import annotations

import pytest
import torch

from kvferry.reference.model import Model, ModelConfig
from kvferry.reference.paged import BlockPool, PagedCache, PagedConfig, attention
from reference.small import SMALL_MODEL, dense_logits

CPU = torch.device("cpu")


def test_equal_seeds_give_equal_weights_and_others_do_not() -> None:
    first, again = (Model(SMALL_MODEL, CPU, torch.float32) for _ in range(2))
    other = Model(ModelConfig(**{**vars(SMALL_MODEL), "seed": 9}), CPU, torch.float32)
    assert torch.equal(first.layers[1].down, again.layers[1].down)
    assert not torch.equal(first.head, other.head)
    assert first.config.name == again.config.name != other.config.name


@pytest.mark.parametrize(
    ("change", "text"),
    [({"num_heads": 3}, "heads"), ({"num_kv_heads": 3}, "evenly"), ({"hidden_size": 4}, "even")],
)
def test_a_shape_that_does_not_divide_is_refused(change: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ModelConfig(**{**vars(SMALL_MODEL), **change})


def test_attention_equals_torchs_own() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 8), torch.randn(21, 2, 8), torch.randn(21, 2, 8)
    mask = torch.ones(5, 21, dtype=torch.bool).tril(21 - 5)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(attention(q, k, v), expected.transpose(0, 1).reshape(5, 32))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 200])
def test_paged_steps_equal_the_dense_twin(length: int) -> None:
    model = Model(SMALL_MODEL, CPU, torch.float32)
    cache = PagedCache(SMALL_MODEL, PagedConfig(num_blocks=16), CPU, torch.float32)
    blocks = BlockPool(16, shuffle_seed=3).allocate(-(-length // 16))
    tokens = torch.randint(SMALL_MODEL.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
    for start in range(0, length, 64):
        count = min(64, length - start)
        logits = model.step(tokens[start : start + count], start, cache.attend(blocks, start, count))
    torch.testing.assert_close(logits, dense_logits(model, tokens), rtol=1e-3, atol=1e-3)


def test_kv_lies_where_the_block_table_says() -> None:
    cache = PagedCache(SMALL_MODEL, PagedConfig(num_blocks=4), CPU, torch.float32)
    q = torch.randn(3, SMALL_MODEL.num_heads, SMALL_MODEL.head_dim)
    k, v = torch.randn(2, 3, SMALL_MODEL.num_kv_heads, SMALL_MODEL.head_dim)
    cache.attend([3, 1], 15, 3)(1, q, k, v)
    assert torch.equal(cache.layers[1][0, 3, 15], k[0])
    assert torch.equal(cache.layers[1][0, 1, 0], k[1])
    assert torch.equal(cache.layers[1][1, 1, 1], v[2])
    assert not cache.layers[0].any()
    assert cache.layers[0].untyped_storage().data_ptr() == cache.layers[1].untyped_storage().data_ptr()


def test_the_pool_hands_out_each_block_once_and_refuses_too_many() -> None:
    pool = BlockPool(8)
    taken = pool.allocate(5)
    with pytest.raises(MemoryError, match="4 blocks wanted, 3 free"):
        pool.allocate(4)
    assert sorted(taken + pool.allocate(3)) == list(range(8))
    pool.free(taken)
    assert pool.num_free == 5
