"""Engines of different tensor-parallel sizes: each pair of ranks moves the heads that they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.errors import TransferError
from kvferry.p2p import P2pNcclEngine
from p2p.conftest import Make
from p2p.p2p_side import make_caches

HEADS = 4
FROM, TO = [5, 1, 30], [9, 8, 60]
Caches = dict[str, torch.Tensor]


def ranks(make: Make, whole: Caches, size: int) -> tuple[list[P2pNcclEngine], list[Caches]]:
    """An engine a rank, with its share of the heads."""
    caches = [
        {name: cache.chunk(size, dim=3)[rank].contiguous() for name, cache in whole.items()} for rank in range(size)
    ]
    engines = [make(cache, tp_rank=rank, tp_size=size, kv_buffer_size=1 << 20) for rank, cache in enumerate(caches)]
    return engines, caches


def together(caches: list[Caches]) -> Caches:
    return {name: torch.cat([cache[name] for cache in caches], dim=3) for name in caches[0]}


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("claimed_first", [False, True])
@pytest.mark.parametrize(("p_size", "d_size"), [(1, 2), (2, 1), (2, 4), (4, 1), (2, 2)])
def test_all_heads_arrive(make: Make, p_size: int, d_size: int, asked: bool, claimed_first: bool) -> None:
    source, before = make_caches(heads=HEADS, seed=1), make_caches(heads=HEADS, seed=2)
    senders, _ = ranks(make, source, p_size)
    receivers, targets = ranks(make, before, d_size)
    readers, parts = max(1, d_size // p_size), max(1, p_size // d_size)

    def send() -> list[Any]:
        found = []
        for rank, engine in enumerate(senders):
            first = rank * d_size // p_size
            addresses = [receiver.address for receiver in receivers[first : first + readers]]
            found.append(engine.send_blocks("t", FROM, None if asked else addresses, readers=readers))
        return found

    def receive() -> list[Any]:
        found = []
        for rank, engine in enumerate(receivers):
            first = rank * p_size // d_size
            addresses = [sender.address for sender in senders[first : first + parts]] if asked else None
            found.append(engine.receive_blocks("t", TO, addresses, senders=parts, timeout_s=30))
        return found

    transfers = receive() + send() if claimed_first else send() + receive()
    for transfer in transfers:
        transfer.wait(30)
    after = together(targets)
    for name, cache in before.items():
        expected = cache.clone()
        expected[:, TO] = source[name][:, FROM]
        assert torch.equal(after[name], expected)


def test_pairs_that_share_nothing(make: Make) -> None:
    """E9: refused when they greet, with both named."""
    source = make_caches(heads=HEADS, seed=1)
    senders, _ = ranks(make, source, 2)
    receivers, _ = ranks(make, source, 4)
    with pytest.raises(TransferError, match=r"rank 3 of 4 and rank 0 of 2 .* have no head in common") as caught:
        senders[0].send_blocks("t", FROM, receivers[3].address).wait(30)
    assert caught.value.code == "mismatch"


def test_sizes_that_are_not_supported(make: Make) -> None:
    sender = make(make_caches(heads=2), tp_rank=0, tp_size=2)
    receiver = make(make_caches(heads=2), tp_rank=0, tp_size=3)
    with pytest.raises(TransferError, match="rank 0 of 3 and rank 0 of 2 with 2 and 2 KV heads"):
        sender.send_blocks("t", FROM, receiver.address).wait(30)


def test_one_sender_of_two_dies_before_it_sends(make: Make) -> None:
    """The claim fails as a whole."""
    source = make_caches(heads=HEADS, seed=1)
    senders, _ = ranks(make, source, 2)
    receivers, _ = ranks(make, source, 1)
    receiving = receivers[0].receive_blocks("t", TO, [sender.address for sender in senders], timeout_s=30)
    senders[0].send_blocks("t", FROM).wait(30)
    assert not receiving.done()
    senders[1].close()
    with pytest.raises(TransferError):
        receiving.wait(30)
