"""Blocks from engine to engine, in one process: every order in which the two sides can come, over either carrier."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from kvferry.errors import BlockIdError, DeadlineError, LayoutError, TransferError
from p2p.conftest import Make
from p2p.p2p_side import FORMAT, make_caches
from p2p.pairs import FROM, TO, Pair, carriers, equal, error_code, send, send_one_layer
from serving.process import eventually


def test_claimed_before_it_is_sent(pair: Pair, carrier: str) -> None:
    """N1: one transfer id on both sides, whatever they call the request themselves. Other blocks stay as they are."""
    p, source, d, target = pair
    untouched = {name: cache.clone() for name, cache in target.items()}
    receiving = d.receive_blocks("abc", TO, timeout_s=20)
    sending = p.send_blocks("abc", FROM, d.address)
    receiving.wait(20)
    sending.wait(20)
    assert equal(source, target)
    others = [block for block in range(64) if block not in TO]
    assert all(torch.equal(target[name][:, others], untouched[name][:, others]) for name in target)
    assert d.stats()["used_bytes"] == {"buffer": 0}
    assert carriers(p) == carriers(d) == [carrier]


def test_sent_before_it_is_claimed(pair: Pair) -> None:
    """It lands in the buffer, so that the sender has its blocks back, and is copied once it is claimed."""
    p, source, d, target = pair
    p.send_blocks("abc", FROM, d.address).wait(20)
    assert d.stats()["used_bytes"]["buffer"] > 0
    assert d.stats()["unclaimed"] == 1
    kept = {name: cache[:, FROM].clone() for name, cache in source.items()}
    for cache in source.values():
        cache.zero_()  # the sender may do so now
    d.receive_blocks("abc", TO, timeout_s=20).wait(20)
    assert all(torch.equal(target[name][:, TO], kept[name]) for name in kept)
    assert d.stats()["used_bytes"] == {"buffer": 0}
    assert d.stats()["unclaimed"] == 0


def test_asked_for(pair: Pair) -> None:
    p, source, d, target = pair
    sending = p.send_blocks("abc", FROM)
    d.receive_blocks("abc", TO, p.address, timeout_s=20).wait(20)
    sending.wait(20)
    assert equal(source, target)


def test_asked_for_before_it_is_there(pair: Pair) -> None:
    p, source, d, target = pair
    receiving = d.receive_blocks("abc", TO, p.address, timeout_s=20)
    eventually(lambda: bool(p.stats()["peers"]))
    assert not receiving.done()
    p.send_blocks("abc", FROM).wait(20)
    receiving.wait(20)
    assert equal(source, target)


def test_layer_by_layer(pair: Pair) -> None:
    p, source, d, target = pair
    receiving = d.receive_blocks("abc", TO, timeout_s=20)
    sending = p.send_blocks("abc", FROM, d.address, layer_wise=True)
    for layer, name in enumerate(source):
        source[name].view(torch.int16)[:, FROM] += 1  # computed only now
        sending.layer_ready(layer)
        receiving.wait_layer(layer, 20)
        assert torch.equal(target[name][:, TO], source[name][:, FROM])
        assert receiving.done() == sending.done() == (layer == 3) or layer == 3
    receiving.wait(20)
    sending.wait(20)


def test_nobody_sends(pair: Pair) -> None:
    """N1: an unmatched claim ends at its deadline, and nothing else is disturbed."""
    p, source, d, target = pair
    waiting = d.receive_blocks("zzz", [3], timeout_s=0.3)
    send(p, d)
    with pytest.raises(TransferError, match="did not come in time") as caught:
        waiting.wait(20)
    assert caught.value.code == "timed_out"
    assert equal(source, target)


def test_what_failed_to_come_in_time_is_refused_later(pair: Pair) -> None:
    p, _, d, target = pair
    before = {name: cache.clone() for name, cache in target.items()}
    with pytest.raises(TransferError):
        d.receive_blocks("abc", TO, timeout_s=0.05).wait(20)
    with pytest.raises(TransferError) as caught:
        p.send_blocks("abc", FROM, d.address).wait(20)
    assert caught.value.code == "timed_out"
    assert all(torch.equal(target[name], before[name]) for name in target)
    sending = p.send_blocks("again", FROM, d.address)
    d.receive_blocks("again", TO, timeout_s=20).wait(20)
    sending.wait(20)


def test_a_live_id_is_refused_and_the_first_is_delivered(pair: Pair, make: Make) -> None:
    """N11: also where another engine sends it."""
    p, source, d, target = pair
    other = make(make_caches(seed=3))
    first = p.send_blocks("abc", FROM, d.address)
    first.wait(20)
    with pytest.raises(TransferError) as caught:
        other.send_blocks("abc", [1, 2, 3, 4], d.address).wait(20)
    assert caught.value.code == "duplicate"
    d.receive_blocks("abc", TO, timeout_s=20).wait(20)
    assert equal(source, target)


def test_an_id_that_is_being_sent_or_claimed(pair: Pair) -> None:
    p, _, d, _ = pair
    first = p.send_blocks("abc", FROM, d.address, layer_wise=True)
    with pytest.raises(TransferError, match="is being sent"):
        p.send_blocks("abc", FROM, d.address).wait(20)
    waiting = d.receive_blocks("abc", TO, timeout_s=20)
    with pytest.raises(TransferError, match="is claimed already"):
        d.receive_blocks("abc", TO, timeout_s=20).wait(20)
    for layer in range(4):
        first.layer_ready(layer)
    waiting.wait(20)


def test_another_number_of_blocks(pair: Pair) -> None:
    """Both sides get an error, and the session stays usable."""
    p, source, d, target = pair
    receiving = d.receive_blocks("abc", [1, 2], timeout_s=20)
    sending = p.send_blocks("abc", FROM, d.address)
    for transfer in (receiving, sending):
        with pytest.raises(TransferError, match="4 blocks come") as caught:
            transfer.wait(20)
        assert caught.value.code == "mismatch"
    send(p, d, "next")
    assert equal(source, target)


@pytest.mark.parametrize("who", ["receiver", "sender"])
def test_one_side_gives_up_in_the_middle(pair: Pair, who: str) -> None:
    """Both get the error, what the sender still does about it is nothing, and the session goes on."""
    p, source, d, target = pair
    receiving, sending = send_one_layer(p, d)
    (receiving if who == "receiver" else sending).cancel()
    assert error_code(receiving) == error_code(sending) == "cancelled"
    sending.layer_ready(1)
    send(p, d, "next")
    assert equal(source, target)


def test_rejected_before_it_is_taken(pair: Pair) -> None:
    """N10: D does not want it, and P has its blocks back in less than a second."""
    p, _, d, _ = pair
    kept = p.send_blocks("abc", FROM)
    d.reject("abc", p.address)
    assert error_code(kept) == "rejected"


def test_asked_for_after_the_lease(make: Make) -> None:
    """N10: "expired", and no data."""
    target = make_caches(seed=2)
    p, d = make(True, lease_s=0.2), make(target)
    before = {name: cache.clone() for name, cache in target.items()}
    sending = p.send_blocks("abc", FROM)
    with pytest.raises(TransferError, match="lease") as caught:
        sending.wait(20)
    assert caught.value.code == "expired"
    receiving = d.receive_blocks("abc", TO, p.address, timeout_s=20)
    # Where greeting took longer than the lease is remembered, the ask waits for as long as the claim does.
    assert error_code(receiving) in ("expired", "unknown", "timed_out")
    assert all(torch.equal(target[name], before[name]) for name in target)


def test_nobody_claims_what_has_landed(make: Make) -> None:
    """Its room is free again after the lease, and a claim that comes later is told so."""
    p, d = make(True), make(True, lease_s=0.3)
    p.send_blocks("abc", FROM, d.address).wait(20)
    eventually(lambda: d.stats()["used_bytes"] == {"buffer": 0})
    late = d.receive_blocks("abc", TO, timeout_s=20)
    assert error_code(late) in ("expired", "timed_out")


def test_two_transfers_of_60_percent_with_layers_interleaved(make: Make) -> None:
    """Admission is by whole transfer: one has all its room before its first layer comes, the other waits for it."""
    source, target = make_caches(seed=1), make_caches(seed=2)
    block_bytes = sum(cache[:, 0].nbytes for cache in source.values())
    p, d = make(source), make(target, kv_buffer_size=block_bytes * 4 * 10 // 6 + 4096)
    sends = [p.send_blocks(name, blocks, d.address, layer_wise=True) for name, blocks in (("a", FROM), ("b", TO))]
    for layer in range(4):
        for sending in sends:
            sending.layer_ready(layer)
    sends[0].wait(20)
    assert not sends[1].done()
    d.receive_blocks("a", TO, timeout_s=20).wait(20)
    sends[1].wait(20)
    assert equal(source, target)
    d.receive_blocks("b", FROM, timeout_s=20).wait(20)
    assert all(torch.equal(target[name][:, FROM], source[name][:, TO]) for name in source)


def test_both_ways_at_once(pair: Pair) -> None:
    """N4."""
    p, source, d, target = pair
    for turn in range(20):
        back = p.receive_blocks(f"back {turn}", [40, 41, 42, 43], timeout_s=20)
        forth = d.receive_blocks(f"forth {turn}", TO, timeout_s=20)
        sends = [
            d.send_blocks(f"back {turn}", [20, 21, 22, 23], p.address),
            p.send_blocks(f"forth {turn}", FROM, d.address),
        ]
        for transfer in (back, forth, *sends):
            transfer.wait(20)
    assert equal(source, target)
    assert all(torch.equal(source[name][:, 40:44], target[name][:, 20:24]) for name in source)


def test_a_ring_of_three(make: Make) -> None:
    caches = [make_caches(seed=seed) for seed in range(3)]
    ring = [make(cache) for cache in caches]
    waits: list[Any] = [engine.receive_blocks("round", TO, timeout_s=20) for engine in ring]
    for place, engine in enumerate(ring):
        waits.append(engine.send_blocks("round", FROM, ring[(place + 1) % 3].address))
    for transfer in waits:
        transfer.wait(20)
    assert all(equal(caches[place], caches[(place + 1) % 3]) for place in range(3))


def test_bad_arguments(pair: Pair, make: Make) -> None:
    p, _, d, _ = pair
    for blocks in ([], [64], [-1], [1, 1]):
        with pytest.raises(BlockIdError):
            p.send_blocks("abc", blocks, d.address)
    with pytest.raises(TransferError, match="no address"):
        p.send_blocks("abc", [1], "nonsense")
    for name in ("", "x" * 2000):
        with pytest.raises(ValueError, match="transfer id"):
            p.send_blocks(name, [1], d.address)
    with pytest.raises(LayoutError, match="register_kv_caches first"):
        make().send_blocks("abc", [1], d.address)


def test_a_peer_without_caches(pair: Pair, make: Make) -> None:
    p, _, _, _ = pair
    bare = make()
    with pytest.raises(TransferError, match="register their KV caches first"):
        p.send_blocks("abc", FROM, bare.address).wait(20)


def test_waiting_has_a_time_out(pair: Pair) -> None:
    _, _, d, _ = pair
    receiving = d.receive_blocks("abc", TO, timeout_s=20)
    with pytest.raises(DeadlineError):
        receiving.wait(0.01)
    receiving.cancel()
    with pytest.raises(TransferError, match="gave it up"):
        receiving.wait(20)


def test_closing_ends_all(pair: Pair) -> None:
    p, _, d, _ = pair
    receiving, sending = send_one_layer(p, d)
    d.close()
    assert error_code(receiving) == "closed"
    assert error_code(sending) in ("closed", "peer_gone")  # its last word, or its hanging up, whatever comes first
    with pytest.raises(TransferError, match="closed"):
        d.receive_blocks("more", TO)


def test_another_layout_is_refused_by_name(pair: Pair, make: Make) -> None:
    p, _, _, _ = pair
    other = make()
    other.register_kv_caches({"layer.0": torch.zeros(2, 8, 16, 2, 32, dtype=torch.float16)}, format=FORMAT)
    with pytest.raises(TransferError, match="1 layers here, 16 and 4 there") as caught:
        p.send_blocks("abc", FROM, other.address).wait(20)
    assert caught.value.code == "mismatch"


def test_a_forked_child_has_no_engine(pair: Pair) -> None:
    """It is told so, and the parent's goes on."""
    p, source, d, target = pair
    send(p, d, "before")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            d.receive_blocks("child", TO)
        except TransferError as error:
            status = 0 if error.code == "closed" else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    receiving = d.receive_blocks("after", FROM, timeout_s=20)
    p.send_blocks("after", TO, d.address).wait(20)
    receiving.wait(20)
    assert equal(source, target)


def test_the_kv_of_something_else(pair: Pair) -> None:
    """Both sides learn that one id was given for two things; the id of another transfer is as good as before."""
    p, source, d, target = pair
    before = {name: cache.clone() for name, cache in target.items()}
    for kept in (False, True):
        receiving = d.receive_blocks(f"a{kept}", TO, p.address if kept else None, tag=b"one prompt", timeout_s=20)
        sending = p.send_blocks(f"a{kept}", FROM, None if kept else d.address, tag=b"another")
        assert error_code(receiving) == error_code(sending) == "mismatch"
    assert all(torch.equal(target[name], before[name]) for name in target)
    receiving = d.receive_blocks("b", TO, tag=b"one prompt", timeout_s=20)
    p.send_blocks("b", FROM, d.address, tag=b"one prompt").wait(20)
    receiving.wait(20)
    assert equal(source, target)
    with pytest.raises(ValueError, match="a tag of 65 bytes"):
        p.send_blocks("c", FROM, d.address, tag=bytes(65))
