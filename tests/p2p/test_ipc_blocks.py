"""Blocks from engine to engine over the one-sided carrier, in one process; what keeps it from being used."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvferry.errors import DeadlineError, LayoutError, TransferError
from kvferry.p2p import P2pNcclEngine
from p2p.conftest import Make
from p2p.p2p_side import make_caches
from p2p.pairs import FROM, TO, Pair, carriers, equal, error_code, send
from serving.process import eventually


@pytest.fixture
def carrier() -> str:
    """What every `pair` here uses."""
    return "ipc"


def test_both_ways_over_one_session(pair: Pair) -> None:
    p, source, d, target = pair
    send(p, d)
    (address,) = p.stats()["peers"]
    assert address == d.address
    receiving = p.receive_blocks("back", FROM, d.address, timeout_s=20)
    target["layer.0"][:, TO] = 7
    d.send_blocks("back", TO).wait(20)
    receiving.wait(20)
    assert equal(source, target)


def test_tensors_go_over_the_link(pair: Pair) -> None:
    p, _, d, _ = pair
    send(p, d)
    tensor = torch.arange(1 << 20)
    sending = p.send_tensor("t", tensor, d.address)
    assert torch.equal(d.recv_tensor("t", timeout_s=20), tensor)
    sending.wait(20)
    assert carriers(p) == ["ipc"]


class Later:
    """An event that is done when the test says so."""

    stream = 1

    reached = False

    def query(self) -> bool:
        return self.reached


def test_what_is_queued_on_a_stream_is_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sender's blocks, and by those that they land in; a claim that is cancelled before that ends, too."""
    p, source, d, target = pair
    before = {name: cache.clone() for name, cache in target.items()}
    send(p, d, "warm")
    theirs, own = Later(), Later()
    monkeypatch.setattr("kvferry.p2p.engine.mark", lambda _: own)
    receiving = d.receive_blocks("abc", TO, timeout_s=20)
    given_up = d.receive_blocks("never", [3], timeout_s=20)
    given_up.cancel()
    monkeypatch.setattr("kvferry.p2p.engine.mark", lambda _: theirs)
    for name, cache in target.items():
        cache.copy_(before[name])
    sending = p.send_blocks("abc", FROM, d.address, layer_wise=True)
    for layer in range(4):
        sending.layer_ready(layer)
    for event in (theirs, own):
        with pytest.raises(DeadlineError):
            receiving.wait(0.2)
        assert all(torch.equal(target[name], before[name]) for name in target)
        event.reached = True
    receiving.wait(20)
    sending.wait(20)
    assert equal(source, target)
    assert error_code(given_up) == "cancelled"


def test_ranks_of_different_sizes(make: Make) -> None:
    """One prefill rank of two heads, two decode ranks of one: each takes its head."""
    source = make_caches(seed=1, heads=2, shared=True)
    targets = [make_caches(seed=2 + rank, heads=1, shared=True) for rank in range(2)]
    p = make(source, tp_size=1)
    ranks = [make(targets[rank], tp_rank=rank, tp_size=2) for rank in range(2)]
    receiving = [d.receive_blocks("abc", TO, timeout_s=20) for d in ranks]
    p.send_blocks("abc", FROM, [d.address for d in ranks]).wait(20)
    for rank, target in enumerate(targets):
        receiving[rank].wait(20)
        assert carriers(ranks[rank]) == ["ipc"]
        for name in source:
            assert torch.equal(target[name][:, TO], source[name][:, FROM][..., rank : rank + 1, :])


def test_caches_that_cannot_be_mapped_go_over_the_host_carrier(make: Make) -> None:
    p, d = make(make_caches(seed=1)), make(make_caches(seed=2, shared=True))
    send(p, d)
    assert carriers(p) == ["host"]
    assert "ordinary memory" in p.stats()["not_offered"]
    assert d.stats()["not_offered"] == ""


def test_where_the_two_cannot_meet(pair: Pair) -> None:
    """Another network namespace: nobody is at the name. Both say what kept them from the better carrier."""
    p, source, d, target = pair
    about = msgspec.structs.replace(p._parts.sessions.own.about, ipc_path="nobody-is-here")
    p._parts.loop.ask(lambda: setattr(p._parts.sessions, "own", _with(p, about)))
    send(p, d)
    assert equal(source, target)
    for engine in (p, d):
        assert carriers(engine) == ["host"]
        (why,) = engine.stats()["fallbacks"].values()
        assert why.startswith("not ipc:")


def _with(engine: P2pNcclEngine, about: Any) -> Any:
    own = engine._parts.sessions.own
    return type(own)(own.instance, own.secret, about)


def test_memory_that_one_side_cannot_map(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    p, source, d, target = pair
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    send(p, d)
    assert equal(source, target)
    (why,) = p.stats()["fallbacks"].values()
    assert "4242" in why or "hung up" in why or "went away" in why


def test_forced_where_the_memory_cannot_be_mapped(make: Make) -> None:
    engine = make(carrier="ipc")
    with pytest.raises(LayoutError, match=r"carrier ipc cannot move.*ordinary memory"):
        engine.register_kv_caches(make_caches(), format="vllm_flash_attention")


def test_forced_where_the_peer_has_it_not(make: Make) -> None:
    p, d = make(make_caches(seed=1, shared=True), carrier="ipc"), make(make_caches(seed=2))
    with pytest.raises(TransferError, match=r"carriers.*ipc") as caught:
        p.send_blocks("abc", FROM, d.address).wait(20)
    assert caught.value.code == "no_carrier"


def test_forced_where_the_two_cannot_meet(make: Make) -> None:
    p = make(make_caches(seed=1, shared=True), carrier="ipc")
    d = make(make_caches(seed=2, shared=True), carrier="ipc")
    about = msgspec.structs.replace(p._parts.sessions.own.about, ipc_path="nobody-is-here")
    p._parts.loop.ask(lambda: setattr(p._parts.sessions, "own", _with(p, about)))
    with pytest.raises(TransferError, match="not ipc") as caught:
        p.send_blocks("abc", FROM, d.address).wait(20)
    assert caught.value.code == "no_carrier"


def test_another_layout_is_refused(make: Make) -> None:
    p, d = make(make_caches(seed=1, shared=True)), make(make_caches(seed=2, heads=4, shared=True))
    with pytest.raises(TransferError) as caught:
        p.send_blocks("abc", FROM, d.address).wait(20)
    assert caught.value.code == "mismatch"


@pytest.mark.parametrize("ids", [[5, 1, 30, 64], [5, 1, 30, -1], [5, 1, 30, 30], [5, 1, 30], [5, 1, 30, 31, 2]])
def test_block_ids_that_are_not_the_peers(pair: Pair, ids: list[int]) -> None:
    """They end the session, and nothing is read."""
    p, _, d, target = pair
    send(p, d)
    before = {name: cache.clone() for name, cache in target.items()}
    data = np.array(ids, dtype="<i4").tobytes()
    core: Any = p._parts.core
    tell = core.tell

    def lie(session: Any, message: Any) -> None:
        named = getattr(message, "block_ids", b"")
        tell(session, msgspec.structs.replace(message, block_ids=data) if named else message)

    core.tell = lie
    receiving = d.receive_blocks("lie", TO, timeout_s=20)
    with pytest.raises(TransferError):
        p.send_blocks("lie", FROM, d.address).wait(20)
    assert error_code(receiving) == "malformed"
    assert all(torch.equal(target[name], before[name]) for name in target)
    core.tell = tell
    send(p, d, "next")


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 32, b"\xff" * 4096])
def test_strangers_at_the_socket(pair: Pair, data: bytes) -> None:
    p, source, d, target = pair
    strangers = []
    for _ in range(5):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(f"\0{p._parts.ipc.path}")
        if data:
            sock.send(data)
        strangers.append(sock)
    send(p, d)
    assert carriers(p) == ["ipc"]
    assert equal(source, target)
    for sock in strangers:
        sock.close()


def test_a_visitor_that_breaks_off(pair: Pair) -> None:
    """With the right ticket, and lies after it: the engine goes on, and what it opened is closed."""
    p, source, d, target = pair
    doors = p._parts.ipc._doors
    session: Any = object()
    for body in (b"", struct.pack("<I", 1 << 30), struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1"):
        doors.await_visitor(session, b"t" * 32)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(f"\0{doors.path}")
            sock.sendall(b"t" * 32 + body)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(20)
            assert sock.recv(1) == b""
    assert doors.caches_of(session) is None
    send(p, d)
    assert carriers(p) == ["ipc"]
    assert equal(source, target)


def test_registered_again(pair: Pair) -> None:
    """Peers map the new caches, and leave the old ones alone."""
    p, source, d, target = pair
    send(p, d)
    renewed = make_caches(seed=9, shared=True)
    p.register_kv_caches(renewed, format="vllm_flash_attention")
    eventually(lambda: not d.stats()["peers"])
    send(p, d, "next")
    assert carriers(p) == ["ipc"]
    assert equal(renewed, target)
    assert not equal(source, target)


def test_nothing_is_left(make: Make) -> None:
    """Descriptors and mappings, after engines have come and gone."""
    keeper = make(make_caches(seed=1, shared=True))

    def open_now() -> tuple[int, int]:
        with open("/proc/self/maps", encoding="ascii") as maps:
            mapped = sum("memfd:kvferry" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), mapped

    target = make_caches(seed=2, shared=True)
    first = None
    for turn in range(4):
        with P2pNcclEngine() as d:
            d.register_kv_caches(target, format="vllm_flash_attention")
            send(keeper, d, f"t{turn}")
            assert carriers(d) == ["ipc"]
        eventually(lambda: not keeper.stats()["peers"])
        if turn == 1:
            first = open_now()
    assert first is not None
    fds, mapped = first
    eventually(lambda: open_now()[0] <= fds and open_now()[1] <= mapped)
