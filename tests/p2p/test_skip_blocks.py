"""Transfers whose first blocks the receiver has already: they are not moved, and nothing else changes place."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.nccl_double import build
from kvferry.copy.pair_copiers import HostPairCopier
from kvferry.errors import BlockIdError, TransferError
from kvferry.p2p import P2pNcclEngine
from kvferry.p2p.carriers.link import Link
from kvferry.p2p.signal.messages import Accept
from p2p.conftest import Make
from p2p.p2p_side import make_caches
from p2p.pairs import FROM, TO, Pair, error_code, send
from p2p.sides import FEW, Sides, address_of
from serving.process import Side, eventually

SKIP = 3
ORDERS = ["claimed first", "sent first", "asked for", "in the buffer"]


def transfer(p: P2pNcclEngine, d: P2pNcclEngine, order: str, skip: int) -> None:
    """All but the first `skip` of the blocks FROM, to the last of TO."""
    address = None if order == "asked for" else d.address
    if order == "claimed first":
        receiving = d.receive_blocks("abc", TO[skip:], skip_blocks=skip, timeout_s=20)
        d.stats()  # its thread answers after it has heard of the claim
        sending = p.send_blocks("abc", FROM, address)
    else:
        sending = p.send_blocks("abc", FROM, address)
        if order == "in the buffer":
            sending.wait(20)
        source = p.address if order == "asked for" else None
        receiving = d.receive_blocks("abc", TO[skip:], source, skip_blocks=skip, timeout_s=20)
    receiving.wait(20)
    sending.wait(20)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("skip", [1, SKIP])
def test_the_others_are_in_place(pair: Pair, order: str, skip: int) -> None:
    p, source, d, target = pair
    untouched = {name: cache.clone() for name, cache in target.items()}
    transfer(p, d, order, skip)
    others = [block for block in range(64) if block not in TO[skip:]]
    for name, cache in target.items():
        assert torch.equal(cache[:, TO[skip:]], source[name][:, FROM[skip:]])
        assert torch.equal(cache[:, others], untouched[name][:, others])
    assert d.stats()["used_bytes"] == {"buffer": 0}


def test_skipped_blocks_are_not_moved(pair: Pair, carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, source, d, _ = pair
    send(p, d, "warm")
    moved: list[int] = []
    link_send, submit = Link.send, HostPairCopier.submit

    def counting_send(self: Any, number: int, item: int, runs: Any) -> None:
        moved.append(runs.nbytes)
        link_send(self, number, item, runs)

    def counting_submit(self: Any, pairs: Any, **options: Any) -> Any:
        moved.append(pairs.block_bytes * len(pairs.to_ids))
        return submit(self, pairs, **options)

    monkeypatch.setattr(Link, "send", counting_send)
    monkeypatch.setattr(HostPairCopier, "submit", counting_submit)
    transfer(p, d, "claimed first", SKIP)
    assert sum(moved) == sum(cache[:, FROM[SKIP:]].nbytes for cache in source.values()), carrier


def test_layer_by_layer(pair: Pair) -> None:
    p, source, d, target = pair
    receiving = d.receive_blocks("abc", TO[1:], skip_blocks=1, timeout_s=20)
    sending = p.send_blocks("abc", FROM, d.address, layer_wise=True)
    for layer, name in enumerate(source):
        sending.layer_ready(layer)
        receiving.wait_layer(layer, 20)
        assert torch.equal(target[name][:, TO[1:]], source[name][:, FROM[1:]])
    receiving.wait(20)
    sending.wait(20)


@pytest.mark.parametrize("skip", [0, 2])
def test_a_count_that_differs(pair: Pair, skip: int) -> None:
    """Refused, also where the blocks that are wanted are as many as come."""
    p, _, d, target = pair
    before = {name: cache.clone() for name, cache in target.items()}
    receiving = d.receive_blocks("abc", TO[1:], skip_blocks=skip, timeout_s=20)
    sending = p.send_blocks("abc", FROM, d.address)
    assert error_code(receiving) == error_code(sending) == "mismatch"
    assert all(torch.equal(target[name], before[name]) for name in target)
    send(p, d, "next")


def test_bad_arguments(pair: Pair) -> None:
    d = pair.d
    with pytest.raises(BlockIdError):
        d.receive_blocks("abc", [], skip_blocks=4)
    with pytest.raises(ValueError, match="skip_blocks is -1"):
        d.receive_blocks("abc", TO, skip_blocks=-1)


def test_a_receiver_that_wants_nothing(pair: Pair, carrier: str) -> None:
    """It would be a receiver with a mistake in it: both sides get an error, and the session goes on."""
    p, _, d, _ = pair
    send(p, d, "warm")
    core: Any = d._parts.core
    tell = core.tell
    core.tell = lambda session, message: tell(
        session, Accept(number=message.number, skip_blocks=4) if isinstance(message, Accept) else message
    )
    receiving = d.receive_blocks("abc", TO, timeout_s=20)
    sending = p.send_blocks("abc", FROM, d.address)
    assert error_code(sending) == "malformed"
    if carrier == "ipc":  # it reads by itself, and may have had all of it by then
        with contextlib.suppress(TransferError):
            receiving.wait(20)
    else:
        assert error_code(receiving) == "malformed"
    core.tell = tell
    send(p, d, "next")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("p_size", "d_size"), [(1, 2), (2, 1), (2, 4)])
def test_ranks_of_different_sizes(make: Make, carrier: str, order: str, p_size: int, d_size: int) -> None:
    """Each pair of ranks moves the heads that it shares, of the blocks that are wanted."""
    source, before = make_caches(heads=4, seed=1), make_caches(heads=4, seed=2)
    shared = carrier == "ipc"
    senders, _ = ranks(make, source, p_size, shared)
    receivers, targets = ranks(make, before, d_size, shared)
    asked, readers, parts = order == "asked for", max(1, d_size // p_size), max(1, p_size // d_size)

    def begin_sends() -> list[Any]:
        found = []
        for rank, engine in enumerate(senders):
            first = rank * d_size // p_size
            addresses = None if asked else [one.address for one in receivers[first : first + readers]]
            found.append(engine.send_blocks("t", FROM, addresses, readers=readers))
        return found

    def claim() -> list[Any]:
        found = []
        for rank, engine in enumerate(receivers):
            first = rank * p_size // d_size
            addresses = [one.address for one in senders[first : first + parts]] if asked else None
            options: dict[str, Any] = {"skip_blocks": SKIP - rank % 2, "senders": parts, "timeout_s": 30}
            found.append(engine.receive_blocks("t", TO[SKIP - rank % 2 :], addresses, **options))
        return found

    if order == "claimed first":
        transfers = claim() + begin_sends()
    else:
        transfers = begin_sends()
        if order == "in the buffer":
            for sending in transfers:
                sending.wait(30)
        transfers += claim()
    for one in transfers:
        one.wait(30)
    for name, cache in before.items():
        expected = [share.clone() for share in cache.chunk(d_size, dim=3)]
        for rank, share in enumerate(source[name].chunk(d_size, dim=3)):
            expected[rank][:, TO[SKIP - rank % 2 :]] = share[:, FROM[SKIP - rank % 2 :]]
            assert torch.equal(targets[rank][name], expected[rank])


def ranks(make: Make, whole: Any, size: int, shared: bool) -> tuple[list[P2pNcclEngine], list[Any]]:
    """An engine a rank, with its share of the heads."""
    caches = [make_caches(heads=4 // size, shared=shared) for _ in range(size)]
    for rank, own in enumerate(caches):
        for name, cache in own.items():
            cache.copy_(whole[name].chunk(size, dim=3)[rank])
    return [make(cache, tp_rank=rank, tp_size=size) for rank, cache in enumerate(caches)], caches


def check_processes(sender: Side, receiver: Side, carrier: str) -> None:
    others = [block for block in range(32) if block not in FEW[SKIP:]]
    before = receiver.call("digest", blocks=others)
    receiver.call("receive", name="t", blocks=FEW[SKIP:], skip_blocks=SKIP)
    sender.call("send", name="t", blocks=FEW, to=address_of(receiver))
    assert receiver.call("wait", what="receive t") == {"code": None}
    assert sender.call("wait", what="send t") == {"code": None}
    assert receiver.call("digest", blocks=FEW[SKIP:]) == sender.call("digest", blocks=FEW[SKIP:])
    assert receiver.call("digest", blocks=others) == before
    assert set(receiver.call("stats")["stats"]["peers"].values()) == {carrier}


def test_in_processes_of_their_own(sides: Sides, carrier: str) -> None:
    shared = carrier == "ipc"
    check_processes(
        sides.start(caches={"seed": 1, "shared": shared}), sides.start(caches={"seed": 2, "shared": shared}), carrier
    )


def test_over_nccl(sides: Sides, tmp_path: Path) -> None:
    """By its double: only what is wanted is gathered. Blocks that nobody has claimed yet stay at the sender."""
    small = {"num_blocks": 32, "num_layers": 3}
    library = str(build(tmp_path))
    sender, receiver = (
        sides.start(caches={**small, "seed": gpu + 1}, fake_gpu=gpu, nccl=library, carrier="nccl") for gpu in (0, 1)
    )
    check_processes(sender, receiver, "nccl")
    wanted = 3 * make_caches(num_blocks=1, num_layers=1)["layer.0"].nbytes * len(FEW[SKIP:])
    assert sender.call("gathered") == {"nbytes": wanted}
    sender.call("send", name="late", blocks=FEW, to=address_of(receiver))
    eventually(lambda: receiver.call("stats")["stats"]["unclaimed"] == 1)
    receiver.call("receive", name="late", blocks=FEW[SKIP:], skip_blocks=SKIP)
    assert receiver.call("wait", what="receive late") == {"code": None}
    assert sender.call("gathered") == {"nbytes": 2 * wanted}


@pytest.mark.parametrize("gpus", [(0, 0), (0, 1)])
def test_over_ipc_between_gpus(sides: Sides, gpus: tuple[int, int]) -> None:
    """By the driver's double: on one GPU, and on two."""
    sender, receiver = (
        sides.start(caches={"num_blocks": 32, "num_layers": 2, "seed": seed}, fake_gpu=gpu)
        for seed, gpu in enumerate(gpus)
    )
    check_processes(sender, receiver, "ipc")
