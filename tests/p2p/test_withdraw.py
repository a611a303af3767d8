"""A sender that says that nothing will come: whoever waits for it fails at once, and nobody else does."""

from __future__ import annotations

import pytest
import torch

from kvferry.errors import TransferError
from p2p.conftest import Make
from p2p.p2p_side import make_caches
from p2p.pairs import FROM, TO, Pair, equal, error_code, send, send_one_layer
from p2p.sides import FEW, Sides, address_of, send_and_check
from p2p.transfer_world import LEASE_S, World
from serving.process import eventually


def codes(outcomes: list[TransferError | None]) -> list[str | None]:
    return [None if error is None else error.code for error in outcomes]


def test_who_waits_for_it(pair: Pair) -> None:
    """A claim that waits to be sent to; another one goes on waiting."""
    p, source, d, target = pair
    receiving, other = (d.receive_blocks(name, TO, timeout_s=20) for name in ("abc", "other"))
    p.withdraw("abc", d.address)
    assert error_code(receiving) == "withdrawn"
    assert not other.done()
    p.send_blocks("other", FROM, d.address).wait(20)
    other.wait(20)
    assert equal(source, target)


def test_who_comes_later(pair: Pair) -> None:
    p, _, d, _ = pair
    p.withdraw("abc", d.address)
    eventually(lambda: bool(d.stats()["peers"]))
    send(p, d, "next")  # what was said before has been heard when this has come
    assert error_code(d.receive_blocks("abc", TO, timeout_s=20)) == "withdrawn"


@pytest.mark.parametrize("asked_first", [False, True])
def test_who_asks_for_it(pair: Pair, asked_first: bool) -> None:
    """No address is needed: whoever asks, now or later, has said where it is."""
    p, _, d, _ = pair
    if asked_first:
        receiving = d.receive_blocks("abc", TO, p.address, timeout_s=20)
        eventually(lambda: bool(p._parts.core.outgoing._asks))
        p.withdraw("abc")
    else:
        p.withdraw("abc")
        receiving = d.receive_blocks("abc", TO, p.address, timeout_s=20)
    assert error_code(receiving) == "withdrawn"


def test_a_tensor(make: Make) -> None:
    p, d = make(), make()
    waiting = d.recv_tensor_async("t", timeout_s=20)
    p.withdraw("t", d.address)
    assert error_code(waiting) == "withdrawn"


def test_what_is_kept_ends(pair: Pair) -> None:
    p, _, d, _ = pair
    kept = p.send_blocks("abc", FROM)
    p.withdraw("abc")
    assert error_code(kept) == "withdrawn"
    assert error_code(d.receive_blocks("abc", TO, p.address, timeout_s=20)) == "withdrawn"


def test_in_the_middle(pair: Pair) -> None:
    """Both sides end, once nothing touches their blocks any more; the session goes on."""
    p, source, d, target = pair
    receiving, sending = send_one_layer(p, d)
    p.withdraw("abc", d.address)
    assert error_code(receiving) == error_code(sending) == "withdrawn"
    send(p, d, "next")
    assert equal(source, target)


def test_an_id_that_is_sent_after_all(pair: Pair) -> None:
    """As a router may do that tries again under one id."""
    p, source, d, target = pair
    p.withdraw("abc", d.address)
    send(p, d, "abc")
    assert equal(source, target)
    p.withdraw("abc")
    p.send_blocks("abc", FROM)
    target["layer.0"].zero_()
    d.receive_blocks("abc", TO, p.address, timeout_s=20).wait(20)
    assert equal(source, target)


def test_what_has_landed_stays(pair: Pair) -> None:
    p, source, d, target = pair
    p.send_blocks("abc", FROM, d.address).wait(20)
    p.withdraw("abc", d.address)
    send(p, d, "next")
    for cache in target.values():
        cache.zero_()
    d.receive_blocks("abc", TO, timeout_s=20).wait(20)
    assert equal(source, target)


def test_all_ranks(make: Make) -> None:
    """Two decode ranks wait for one prefill rank, and one decode rank for two."""
    p = make(make_caches(heads=2, seed=1))
    halves = [make(make_caches(heads=1), tp_rank=rank, tp_size=2) for rank in range(2)]
    waiting = [half.receive_blocks("abc", TO, timeout_s=20) for half in halves]
    p.withdraw("abc", [half.address for half in halves])
    assert [error_code(one) for one in waiting] == ["withdrawn"] * 2
    receiving = p.receive_blocks("back", TO, senders=2, timeout_s=20)
    for half in halves:
        half.withdraw("back", p.address)
    assert error_code(receiving) == "withdrawn"


def test_an_empty_id(pair: Pair) -> None:
    with pytest.raises(ValueError, match="transfer id"):
        pair.p.withdraw("")


@pytest.mark.parametrize("shared", [False, True])
def test_in_processes_of_their_own(sides: Sides, shared: bool) -> None:
    sender, receiver, asker = (sides.start(caches={"seed": seed, "shared": shared}) for seed in (1, 2, 3))
    before = receiver.call("digest", blocks=FEW)
    receiver.call("receive", name="t", blocks=FEW)
    asker.call("receive", name="t", blocks=FEW, source=address_of(sender))
    sender.call("withdraw", name="t", to=address_of(receiver))
    for side in (receiver, asker):
        assert side.call("wait", what="receive t", within_s=20) == {"code": "withdrawn"}
    assert receiver.call("digest", blocks=FEW) == before
    send_and_check(sender, receiver, "next")


def test_it_is_forgotten_after_the_time_of_a_lease() -> None:
    world = World()
    world.withdraw("a")
    world.settle()
    world.pass_time(LEASE_S)
    for ask in (False, True):
        late = world.claim("a", own_memory=True, wait_s=5, ask=ask)
        world.settle()
        assert late.outcomes == []
        world.pass_time(5)
        world.settle()
        assert codes(late.outcomes) == ["timed_out"]


def test_a_claim_that_was_told_may_be_made_again() -> None:
    world = World()
    first = world.claim("a", own_memory=True, wait_s=5, ask=False)
    world.withdraw("a")
    world.settle()
    assert codes(first.outcomes) == ["withdrawn"]
    again = world.claim("a", own_memory=True, wait_s=5, ask=False)
    world.send("a", 10, keep=False, ready=True)
    world.settle()
    assert codes(again.outcomes) == [None]


def test_somebody_elses_transfer_is_left_alone(pair: Pair, make: Make) -> None:
    """An engine that sends nothing under an id cannot end what another one sends."""
    p, source, d, target = pair
    receiving, sending = send_one_layer(p, d)
    other = make()
    other.withdraw("abc", d.address)
    for name in ("x", "y"):  # the second is sent behind the withdrawal
        other.send_tensor(name, torch.zeros(8), d.address).wait(20)
    for layer in (1, 2, 3):
        sending.layer_ready(layer)
    receiving.wait(20)
    sending.wait(20)
    assert equal(source, target)
    assert torch.equal(target["layer.0"][:, TO], source["layer.0"][:, FROM])
