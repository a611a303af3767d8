"""What the host carrier stages with: rings of slots, and the exchange of slots over a link."""

from __future__ import annotations

import select
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from doubles import copy_kernel, fake_cuda
from kvferry.cuda.device import bound
from kvferry.cuda.stream import Event
from kvferry.errors import CudaError, PeerGoneError
from kvferry.p2p.caches import KVCaches
from kvferry.p2p.carriers.link import FRAME_BYTES, Link
from kvferry.p2p.carriers.pushes.buffers import Copies
from kvferry.p2p.carriers.pushes.device_ring import DeviceRing
from kvferry.p2p.carriers.pushes.host_ring import HostRing
from kvferry.p2p.carriers.pushes.polled import PolledCopies
from kvferry.p2p.carriers.pushes.ring import Ring
from kvferry.p2p.carriers.pushes.run import Part, Run
from kvferry.p2p.carriers.runs import ByteRuns
from kvferry.p2p.carriers.staged import SLOTS, LinkLane
from kvferry.p2p.geometry import Piece
from kvferry.p2p.memory import BlockMemory, FlatMemory, Memory
from p2p.p2p_side import FORMAT, make_caches, on_fake_gpu, random_bytes
from serving.process import eventually

SLOT = 4096
KINDS = ["host", "pinned", "device"]


@pytest.fixture
def driver() -> Iterator[fake_cuda.FakeDriver]:
    with fake_cuda.installed((0,)) as made:
        copy_kernel.install(made)
        yield made


class Slots:
    """Two slots, and what copies from and to them."""

    def __init__(self, kind: str, driver: fake_cuda.FakeDriver) -> None:
        self.copies: Copies
        self.on_gpu = kind != "host"
        if kind == "device":
            self.copies = polled = PolledCopies(0, self._reached)
            self.close = polled.close
            memory = driver.mem_alloc(2 * SLOT)
            self.addresses: tuple[int, ...] = (memory, memory + SLOT)
            return
        ring: Ring = HostRing(slots=2, slot_bytes=SLOT) if kind == "host" else DeviceRing(0, slots=2, slot_bytes=SLOT)
        self.copies, self.addresses, self.close = ring, ring.addresses, ring.close

    def copy(self, part: Part, slot: int, *, to_flat: bool) -> None:
        done(lambda on_done: self.copies.copy(part, slot, on_done, to_flat=to_flat))

    def _reached(self, event: Event, then: Callable[[Exception | None], None]) -> None:
        event.synchronize()
        then(None)


@pytest.fixture(params=KINDS)
def slots(request: pytest.FixtureRequest, driver: fake_cuda.FakeDriver) -> Iterator[Slots]:
    with bound(0):
        made = Slots(request.param, driver)
        yield made
        made.close()
        made.close()


def done(start: Callable[[Callable[[Exception | None], None]], None]) -> None:
    ended: Future[Exception | None] = Future()
    start(ended.set_result)
    error = ended.result(20)
    if error is not None:
        raise error


def content(memory: Memory, pieces: tuple[Piece, ...], items: int = 1) -> bytes:
    """All bytes of the first items, in their order."""
    every = [memory.runs(item, pieces) for item in range(items)]
    return b"".join(buffer for runs in every for buffer in runs.buffers(0, runs.nbytes))


def run_of(memory: Memory, pieces: tuple[Piece, ...], sizes: tuple[int, ...]) -> Run:
    return Run(1, 0, memory, (pieces,) * len(sizes), sizes)


def move(slots: Slots, source: Run, target: Run, step: int) -> None:
    """From one to the other, in parts of `step` bytes, through both slots."""
    for begin in range(0, source.nbytes, step):
        end = min(begin + step, source.nbytes)
        one, two = slots.addresses
        slots.copy(Part(source, begin, end), one, to_flat=True)
        moved = ByteRuns.single(one, end - begin, slots).buffers(0, end - begin)[0]
        ByteRuns.single(two, end - begin, slots).buffers(0, end - begin)[0][:] = moved
        slots.copy(Part(target, begin, end), two, to_flat=False)


@pytest.mark.parametrize("step", [SLOT, 1000, 77])
@pytest.mark.parametrize("pieces", [((0, 0, 2048), (1, 0, 2048)), ((1, 64, 100), (0, 3, 501)), ((0, 7, 1),)])
def test_blocks(slots: Slots, pieces: tuple[tuple[int, int, int], ...], step: int) -> None:
    """Any pieces of the planes of two layers, cut anywhere; nothing else is touched."""
    caches = [make_caches(num_blocks=9, num_layers=2, seed=seed) for seed in (1, 2)]
    if slots.on_gpu:
        caches = [on_fake_gpu(one, 0) for one in caches]
    before = {name: layer.clone() for name, layer in caches[1].items()}
    source, target = (KVCaches.describe(one, FORMAT) for one in caches)
    wanted = tuple(Piece(*piece) for piece in pieces)
    sent = BlockMemory(source, np.array([7, 0, 3]))
    landed = BlockMemory(target, np.array([1, 8, 2]))
    expected = content(sent, wanted, 2)
    sizes = (len(expected) // 2,) * 2
    move(slots, run_of(sent, wanted, sizes), run_of(landed, wanted, sizes), step)
    assert content(landed, wanted, 2) == expected
    others = [block for block in range(9) if block not in (1, 8, 2)]
    rest = torch.ones(2, 2048, dtype=torch.bool)
    for plane, start, length in pieces:
        rest[plane, start : start + length] = False
    for name, layer in caches[1].items():
        assert torch.equal(layer[:, others], before[name][:, others])
        after, earlier = (one.reshape(2, 9, -1).view(torch.uint8) for one in (layer, before[name]))
        for block in (1, 8, 2):
            assert torch.equal(after[:, block][rest], earlier[:, block][rest])


@pytest.mark.parametrize("sizes", [(1,), (SLOT,), (10_001,), (5, 0, SLOT, 3000)])
def test_flat_memory(slots: Slots, sizes: tuple[int, ...]) -> None:
    """Items that lie apart, too."""
    sent, landed = ([random_bytes(size, size) * first for size in sizes] for first in (1, 0))
    source, target = (FlatMemory(tuple((one.data_ptr(), len(one)) for one in every), every) for every in (sent, landed))
    move(slots, run_of(source, (), sizes), run_of(target, (), sizes), SLOT)
    assert all(torch.equal(one, two) for one, two in zip(sent, landed, strict=True))


def test_the_copy_of_another_run(slots: Slots) -> None:
    """What one run left behind with the kernel is not used for the next."""
    one, two = (make_caches(num_blocks=9, num_layers=1, seed=seed) for seed in (1, 2))
    if slots.on_gpu:
        one, two = on_fake_gpu(one, 0), on_fake_gpu(two, 0)
    source, target = (KVCaches.describe(each, FORMAT) for each in (one, two))
    pieces = (Piece(0, 0, 2048), Piece(1, 0, 2048))
    for sent, landed in (([0, 1], [2, 3]), ([4, 5], [0, 1])):
        runs = [
            run_of(BlockMemory(caches, np.array(ids)), pieces, (8192,))
            for caches, ids in ((source, sent), (target, landed))
        ]
        move(slots, runs[0], runs[1], SLOT)
        assert torch.equal(two["layer.0"][:, landed], one["layer.0"][:, sent])


def test_nothing_is_kept_of_what_was_copied(slots: Slots) -> None:
    """KV caches that are not registered any more are gone."""
    tensor = random_bytes(10, 1)

    class Owner:
        """Of the memory."""

    owner = Owner()
    kept = weakref.ref(owner)
    part = Part(run_of(FlatMemory(((tensor.data_ptr(), 10),), owner), (), (10,)), 0, 10)
    slots.copy(part, slots.addresses[0], to_flat=True)
    del owner, part
    eventually(lambda: kept() is None)


@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_a_copy_that_fails_is_told(driver: fake_cuda.FakeDriver, kind: str) -> None:
    with bound(0):
        slots = Slots(kind, driver)
        tensor = random_bytes(10, 1)
        driver.fake.failures["cuMemcpyAsync"] = [700]
        part = Part(run_of(FlatMemory(((tensor.data_ptr(), 10),), tensor), (), (10,)), 0, 10)
        with pytest.raises(CudaError):
            slots.copy(part, slots.addresses[0], to_flat=True)
        slots.copy(part, slots.addresses[0], to_flat=True)
        slots.close()


def test_nothing_is_left_pinned(driver: fake_cuda.FakeDriver) -> None:
    ring = DeviceRing(0, slots=2, slot_bytes=SLOT)
    assert any(one.kind == "registered" for one in driver.fake.allocations.values())
    ring.close()
    assert not driver.fake.allocations


class Loop:
    """The links of one engine, of which there is one, without a thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.link = Link(sock, lambda *_: None, lambda: None)

    def call(self, call: Callable[[], None]) -> None:
        call()

    def use(self, _session: Any, use: Callable[[Link], object]) -> None:
        use(self.link)


@pytest.fixture
def loops() -> Iterator[tuple[Any, Any]]:
    one, two = socket.socketpair()
    yield Loop(one), Loop(two)
    one.close()
    two.close()


def turn(loops: tuple[Any, Any]) -> None:
    """What both links can do now."""
    for loop in loops:
        if loop.link.wants_to_send:
            loop.link.flush()
        if select.select([loop.link.socket], [], [], 0)[0]:
            assert loop.link.read()


def lanes(loops: tuple[Any, Any]) -> tuple[LinkLane, LinkLane]:
    """Of one direction."""
    one, two = loops
    session: Any = None
    return LinkLane(one, session, None, sends=True), LinkLane(two, session, None, sends=False)


def test_nothing_is_sent_before_there_is_a_place_for_it(loops: tuple[Any, Any]) -> None:
    sent = [random_bytes(1000, seed) for seed in range(40)]
    landed = [torch.zeros(1000, dtype=torch.uint8) for _ in sent]
    sender, receiver = lanes(loops)
    sending = [sender.exchange(sends=[(one.data_ptr(), 1000)], timeout_s=60) for one in sent]
    receiving: list[Future[None]] = []
    for number, one in enumerate(landed):
        for _ in range(20):
            turn(loops)
        assert [each.done() for each in sending] == [place < number for place in range(len(sent))]
        receiving.append(receiver.exchange(receives=[(one.data_ptr(), 1000)], timeout_s=60))
    while not receiving[-1].done():
        turn(loops)
    assert all(torch.equal(one, two) for one, two in zip(sent, landed, strict=True))


def test_both_ways_over_one_link(loops: tuple[Any, Any]) -> None:
    """Whichever direction is made last, and though the receivers are ahead."""
    ways = [lanes(loops), lanes(loops[::-1])]
    sent = [random_bytes(1000, seed) for seed in range(40)]
    landed = [torch.zeros(1000, dtype=torch.uint8) for _ in sent]
    for place, (one, two) in enumerate(zip(sent, landed, strict=True)):
        sender, receiver = ways[place % 2]
        receiving = receiver.exchange(receives=[(two.data_ptr(), 1000)], timeout_s=60)
        for _ in range(20):
            turn(loops)
        sending = sender.exchange(sends=[(one.data_ptr(), 1000)], timeout_s=60)
        for _ in range(20):
            turn(loops)
        assert sending.done()
        assert receiving.done()
    assert all(torch.equal(one, two) for one, two in zip(sent, landed, strict=True))


def test_a_receiver_that_is_ahead(loops: tuple[Any, Any]) -> None:
    """By as many slots as it may be."""
    sent = [random_bytes(1000, seed) for seed in range(30)]
    landed = [torch.zeros(1000, dtype=torch.uint8) for _ in sent]
    sender, receiver = lanes(loops)
    receiving: list[Future[None]] = []
    for place, one in enumerate(sent):
        for two in landed[len(receiving) : place + SLOTS]:
            receiving.append(receiver.exchange(receives=[(two.data_ptr(), 1000)], timeout_s=60))
        for _ in range(20):
            turn(loops)
        sender.exchange(sends=[(one.data_ptr(), 1000)], timeout_s=60)
        while not receiving[place].done():
            turn(loops)
    assert all(torch.equal(one, two) for one, two in zip(sent, landed, strict=True))


def test_slots_arrive_in_the_order_of_the_calls(loops: tuple[Any, Any]) -> None:
    """Also small ones behind big ones, which are of several frames."""
    sizes = [3 * FRAME_BYTES, 10, 2 * FRAME_BYTES + 1, 1]
    sent = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
    landed = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    sender, receiver = lanes(loops)
    order: list[str] = []
    for number, (one, two) in enumerate(zip(sent, landed, strict=True)):
        receiving = receiver.exchange(receives=[(two.data_ptr(), len(two))], timeout_s=60)
        receiving.add_done_callback(lambda _, number=number: order.append(f"in {number}"))  # type: ignore[misc]
        sending = sender.exchange(sends=[(one.data_ptr(), len(one))], timeout_s=60)
        sending.add_done_callback(lambda _, number=number: order.append(f"out {number}"))  # type: ignore[misc]
    while len(order) < 2 * len(sizes):
        turn(loops)
    for direction in ("in", "out"):
        assert [one for one in order if one.startswith(direction)] == [f"{direction} {n}" for n in range(len(sizes))]
    assert all(torch.equal(one, two) for one, two in zip(sent, landed, strict=True))


def test_a_slot_that_does_not_come(loops: tuple[Any, Any]) -> None:
    """The link is late then; the exchange fails when the session has ended."""
    sender, lane = lanes(loops)
    target = torch.zeros(10, dtype=torch.uint8)
    future = lane.exchange(receives=[(target.data_ptr(), 10)], timeout_s=5)
    assert not loops[1].link.is_late(0)
    assert loops[1].link.is_late(time.monotonic() + 5)
    assert not future.done()
    assert lane.abort("the session has ended").done()
    with pytest.raises(PeerGoneError, match="the session has ended"):
        future.result(0)
    sender.exchange(sends=[(target.data_ptr(), 10)], timeout_s=5)
    assert not loops[0].link.is_late(0)
    assert loops[0].link.is_late(time.monotonic() + 5)
    for late in ({"receives": [(target.data_ptr(), 10)]}, {"sends": [(target.data_ptr(), 10)]}):
        with pytest.raises(PeerGoneError, match="the session has ended"):
            lane.exchange(**late, timeout_s=5).result(0)


def test_a_slot_that_the_peer_does_not_take(loops: tuple[Any, Any]) -> None:
    """Though it has a place for it, and lives: the link is late then."""
    sender, receiver = lanes(loops)
    source, target = (torch.zeros(8 * FRAME_BYTES, dtype=torch.uint8) for _ in range(2))
    receiver.exchange(receives=[(target.data_ptr(), len(target))], timeout_s=500)
    sending = sender.exchange(sends=[(source.data_ptr(), len(source))], timeout_s=5)
    link = loops[0].link
    loops[1].link.flush()
    assert link.read()
    link.flush()
    assert not sending.done()
    assert not link.is_late(0)
    assert link.is_late(time.monotonic() + 5)
