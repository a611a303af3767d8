"""Single tensors: PUT, PUT_ASYNC, GET, the receive buffer and the pool behind it."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from kvferry.errors import NotContiguousError, TransferError
from p2p.conftest import Make
from serving.process import eventually

MIB = 1 << 20
GIB_PART = MIB / (1 << 30)  # a MiB as mem_pool_size_gb


def tensor(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("send_type", ["PUT", "PUT_ASYNC", "GET"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_each_way_and_dtype(make: Make, send_type: str, dtype: torch.dtype) -> None:
    p, d = make(send_type=send_type), make(send_type=send_type)
    sent = torch.randint(0, 2, (3, 5, 7), dtype=torch.uint8).to(dtype)
    sending = p.send_tensor("abc#layer.0", sent, None if send_type == "GET" else d.address)
    assert sending.done() or send_type != "PUT"
    received = d.recv_tensor("abc#layer.0", p.address, timeout_s=20)
    sending.wait(20)
    assert (received.dtype, received.shape) == (dtype, sent.shape)
    assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 3), (1,)])
def test_odd_shapes(make: Make, shape: tuple[int, ...]) -> None:
    p, d = make(), make()
    p.send_tensor("a", torch.ones(shape), d.address)
    received = d.recv_tensor("a", timeout_s=20)
    assert torch.equal(received, torch.ones(shape))


def test_many_layers_in_any_order(make: Make) -> None:
    """As in the engine that this replaces: a tensor a layer, named by request and layer."""
    p, d = make(), make()
    sent = {f"abc#layer.{layer}": tensor(5000 + layer, layer) for layer in range(40)}
    sends = [p.send_tensor(name, one, d.address) for name, one in sent.items()]
    for name in reversed(sent):
        assert torch.equal(d.recv_tensor(name, timeout_s=20), sent[name])
    for sending in sends:
        sending.wait(20)


def test_into_a_tensor_of_ones_own(make: Make) -> None:
    p, d = make(), make(kv_buffer_size=0)
    own = torch.zeros(1000, dtype=torch.uint8)
    waiting = d.recv_tensor_async("a", timeout_s=20, out=own)
    p.send_tensor("a", tensor(1000), d.address).wait(20)
    assert waiting.tensor() is own
    assert torch.equal(own, tensor(1000))
    with pytest.raises(TransferError, match="taken already"):
        waiting.tensor()


def test_room_is_free_when_the_last_view_is_gone(make: Make) -> None:
    """Bytes count until they are really released."""
    p, d = make(), make(kv_buffer_size=MIB)
    p.send_tensor("a", tensor(MIB), d.address).wait(20)
    received = d.recv_tensor("a", timeout_s=20)
    part = received.view(1024, 1024)[3:5]
    del received
    second = p.send_tensor("b", tensor(MIB, 1), d.address)
    gc.collect()
    assert d.stats()["used_bytes"] == {"buffer": MIB}
    assert not second.done()
    assert torch.equal(part.reshape(-1), tensor(MIB)[3 * 1024 : 5 * 1024])
    del part
    second.wait(20)
    assert torch.equal(d.recv_tensor("b", timeout_s=20), tensor(MIB, 1))


def test_too_large_for_everything(make: Make) -> None:
    """N3: refused at once on both sides, and what fits is delivered."""
    p, d = make(), make(kv_buffer_size=16 * MIB, mem_pool_size_gb=32 * GIB_PART)
    waiting = d.recv_tensor_async("big", timeout_s=20)
    started = time.monotonic()
    for transfer in (p.send_tensor("big", torch.zeros(64 * MIB, dtype=torch.uint8), d.address), waiting):
        with pytest.raises(TransferError, match="a buffer of 16777216 and a pool of 33554432 bytes") as caught:
            transfer.wait(20)
        assert caught.value.code == "too_large"
    assert time.monotonic() - started < 10
    p.send_tensor("small", tensor(MIB), d.address)
    assert torch.equal(d.recv_tensor("small", timeout_s=20), tensor(MIB))


def test_full_of_what_nobody_takes(make: Make) -> None:
    """N3: the buffer overflows into the pool, then senders wait; whoever brings memory of its own does not."""
    p, d = make(), make(kv_buffer_size=2 * MIB, mem_pool_size_gb=4 * GIB_PART, lease_s=30)
    filling = [p.send_tensor(f"fill {number}", tensor(MIB, number), d.address) for number in range(6)]
    for sending in filling:
        sending.wait(20)
    assert d.stats()["used_bytes"] == {"buffer": 2 * MIB, "pool": 4 * MIB}
    late = p.send_tensor("late", tensor(MIB, 99), d.address)
    own = torch.empty(3 * MIB, dtype=torch.uint8)
    waiting = d.recv_tensor_async("own", timeout_s=20, out=own)
    p.send_tensor("own", tensor(3 * MIB, 7), d.address).wait(20)
    assert torch.equal(waiting.tensor(), tensor(3 * MIB, 7))
    assert not late.done()
    for number in (5, 0):  # one of the pool, one of the buffer
        assert torch.equal(d.recv_tensor(f"fill {number}", timeout_s=20), tensor(MIB, number))
    assert torch.equal(d.recv_tensor("late", timeout_s=20), tensor(MIB, 99))
    late.wait(20)


def test_what_is_waited_for_goes_before_what_is_not(make: Make) -> None:
    p, d = make(), make(kv_buffer_size=MIB)
    p.send_tensor("first", tensor(MIB), d.address).wait(20)
    unclaimed = p.send_tensor("unclaimed", tensor(MIB, 1), d.address)
    waiting = d.recv_tensor_async("claimed", timeout_s=20)
    p.send_tensor("claimed", tensor(MIB, 2), d.address)
    eventually(lambda: d.stats()["receiving"] == 3)
    d.recv_tensor("first", timeout_s=20)
    assert torch.equal(waiting.tensor(20), tensor(MIB, 2))
    del waiting
    unclaimed.wait(20)


def test_a_full_buffer_empties_when_nobody_takes_it(make: Make) -> None:
    p, d = make(), make(kv_buffer_size=MIB, lease_s=0.5)
    p.send_tensor("nobody", tensor(MIB), d.address).wait(20)
    p.send_tensor("next", tensor(MIB, 1), d.address)
    assert torch.equal(d.recv_tensor("next", timeout_s=20), tensor(MIB, 1))


def test_another_shape_or_dtype(make: Make) -> None:
    """A header that does not match: both sides are told, and the session stays usable."""
    p, d = make(), make()
    for own in (torch.zeros(10, dtype=torch.uint8), torch.zeros(25, dtype=torch.float32)):
        waiting = d.recv_tensor_async("a", timeout_s=20, out=own)
        sending = p.send_tensor("a", tensor(100), d.address)
        for transfer in (sending, waiting):
            with pytest.raises(TransferError, match="TensorMeta") as caught:
                transfer.wait(20)
            assert caught.value.code == "mismatch"
        assert not own.any()
    p.send_tensor("a", tensor(100), d.address)
    assert torch.equal(d.recv_tensor("a", timeout_s=20), tensor(100))


def test_a_name_is_free_again_once_it_was_taken(make: Make) -> None:
    p, d = make(), make()
    for seed in range(3):
        p.send_tensor("a", tensor(100, seed), d.address).wait(20)
        assert torch.equal(d.recv_tensor("a", timeout_s=20), tensor(100, seed))


def test_put_waits_and_raises(make: Make) -> None:
    p, d = make(send_type="PUT"), make(kv_buffer_size=100)
    with pytest.raises(TransferError, match="the receiver has a buffer"):
        p.send_tensor("a", tensor(1000), d.address)


def test_what_cannot_be_sent(make: Make) -> None:
    p, d = make(), make()
    with pytest.raises(NotContiguousError):
        p.send_tensor("a", torch.zeros(4, 4).t(), d.address)


def test_tensors_outlive_their_engine(make: Make) -> None:
    p, d = make(), make(kv_buffer_size=MIB, mem_pool_size_gb=MIB * 4 / (1 << 30))
    received = []
    for name in ("buffer", "pool"):
        p.send_tensor(name, tensor(MIB), d.address)
        received.append(d.recv_tensor(name, timeout_s=20))
    d.close()
    assert all(torch.equal(one, tensor(MIB)) for one in received)
