"""What the host carrier stages with: rings of slots, and the exchange of slots over a link."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from doubles import copy_kernel, fake_cuda
from kvferry.errors import CudaError, PeerGoneError
from kvferry.p2p.caches import KVCaches
from kvferry.p2p.carriers.link import FRAME_BYTES, Link
from kvferry.p2p.carriers.pushes.device_ring import DeviceRing, device_slots, pinned_slots
from kvferry.p2p.carriers.pushes.host_ring import HostRing
from kvferry.p2p.carriers.pushes.ring import Part, Ring
from kvferry.p2p.carriers.runs import ByteRuns
from kvferry.p2p.carriers.staged import LinkLane
from kvferry.p2p.geometry import Piece
from kvferry.p2p.memory import BlockMemory, FlatMemory, Memory
from p2p.p2p_side import FORMAT, make_caches, on_fake_gpu, random_bytes

SLOT = 4096
KINDS = ["host", "pinned", "device"]


@pytest.fixture
def driver() -> Iterator[fake_cuda.FakeDriver]:
    with fake_cuda.installed((0,)) as made:
        copy_kernel.install(made)
        yield made


@pytest.fixture(params=KINDS)
def ring(request: pytest.FixtureRequest, driver: fake_cuda.FakeDriver) -> Iterator[Ring]:
    made: Ring
    if request.param == "host":
        made = HostRing(slots=2, slot_bytes=SLOT)
    else:
        allocate = pinned_slots if request.param == "pinned" else device_slots
        made = DeviceRing(0, slots=2, slot_bytes=SLOT, allocate=allocate)
    yield made
    made.close()
    made.close()


def done(start: Callable[[Callable[[Exception | None], None]], None]) -> None:
    ended: Future[Exception | None] = Future()
    start(ended.set_result)
    error = ended.result(20)
    if error is not None:
        raise error


def content(memory: Memory, pieces: tuple[Piece, ...]) -> bytes:
    """All bytes of the only item, in their order."""
    runs = memory.runs(0, pieces)
    return b"".join(runs.buffers(0, runs.nbytes))


def move(ring: Ring, source: Memory, target: Memory, pieces: tuple[Piece, ...], nbytes: int, step: int) -> None:
    """From one to the other, in parts of `step` bytes, through both slots."""
    for begin in range(0, nbytes, step):
        end = min(begin + step, nbytes)
        one, two = ring.addresses
        done(partial(ring.gather, Part(source, 0, (pieces,), begin, end), one))
        moved = ByteRuns.single(one, end - begin, ring).buffers(0, end - begin)[0]
        ByteRuns.single(two, end - begin, ring).buffers(0, end - begin)[0][:] = moved
        done(partial(ring.scatter, Part(target, 0, (pieces,), begin, end), two))


@pytest.mark.parametrize("step", [SLOT, 1000, 77])
@pytest.mark.parametrize("pieces", [((0, 0, 2048), (1, 0, 2048)), ((1, 64, 100), (0, 3, 501)), ((0, 7, 1),)])
def test_blocks(ring: Ring, pieces: tuple[tuple[int, int, int], ...], step: int) -> None:
    """Any pieces of the planes, cut anywhere; nothing else is touched."""
    caches = [make_caches(num_blocks=9, num_layers=1, seed=seed) for seed in (1, 2)]
    if isinstance(ring, DeviceRing):
        caches = [on_fake_gpu(one, 0) for one in caches]
    before = caches[1]["layer.0"].clone()
    source, target = (KVCaches.describe(one, FORMAT) for one in caches)
    wanted = tuple(Piece(*piece) for piece in pieces)
    sent = BlockMemory(source, np.array([7, 0, 3]))
    landed = BlockMemory(target, np.array([1, 8, 2]))
    expected = content(sent, wanted)
    move(ring, sent, landed, wanted, len(expected), step)
    assert content(landed, wanted) == expected
    others = [block for block in range(9) if block not in (1, 8, 2)]
    assert torch.equal(caches[1]["layer.0"][:, others], before[:, others])
    rest = torch.ones(2, 2048, dtype=torch.bool)
    for plane, start, length in pieces:
        rest[plane, start : start + length] = False
    after = caches[1]["layer.0"].reshape(2, 9, -1).view(torch.uint8)
    for block in (1, 8, 2):
        assert torch.equal(after[:, block][rest], before.reshape(2, 9, -1).view(torch.uint8)[:, block][rest])


@pytest.mark.parametrize("nbytes", [1, SLOT, 10_001])
def test_flat_memory(ring: Ring, nbytes: int) -> None:
    sent, landed = random_bytes(nbytes, 1), torch.zeros(nbytes, dtype=torch.uint8)
    source, target = (FlatMemory(((one.data_ptr(), nbytes),), one) for one in (sent, landed))
    move(ring, source, target, (), nbytes, SLOT)
    assert torch.equal(sent, landed)


def test_a_copy_that_fails_is_told(driver: fake_cuda.FakeDriver) -> None:
    ring = DeviceRing(0, slots=2, slot_bytes=SLOT, allocate=pinned_slots)
    tensor = random_bytes(10, 1)
    driver.fake.failures["cuMemcpyAsync"] = [700]
    part = Part(FlatMemory(((tensor.data_ptr(), 10),), tensor), 0, (), 0, 10)
    with pytest.raises(CudaError):
        done(partial(ring.gather, part, ring.addresses[0]))
    done(partial(ring.gather, part, ring.addresses[0]))
    ring.close()


def test_nothing_is_left_pinned(driver: fake_cuda.FakeDriver) -> None:
    ring = DeviceRing(0, slots=2, slot_bytes=SLOT, allocate=pinned_slots)
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

    def use(self, _session: Any, use: Callable[[Link], None]) -> None:
        use(self.link)


@pytest.fixture
def loops() -> Iterator[tuple[Any, Any]]:
    one, two = socket.socketpair()
    yield Loop(one), Loop(two)
    one.close()
    two.close()


def test_slots_arrive_in_the_order_of_the_calls(loops: tuple[Any, Any]) -> None:
    """Also small ones behind big ones, which are of several frames."""
    sizes = [3 * FRAME_BYTES, 10, 2 * FRAME_BYTES + 1, 1]
    sent = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
    landed = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    ring: Any = None
    sender, receiver = (LinkLane(loop, None, ring) for loop in loops)  # type: ignore[arg-type]
    order: list[str] = []
    for number, (one, two) in enumerate(zip(sent, landed, strict=True)):
        receiving = receiver.exchange(receives=[(two.data_ptr(), len(two))], timeout_s=60)
        receiving.add_done_callback(lambda _, number=number: order.append(f"in {number}"))  # type: ignore[misc]
        sending = sender.exchange(sends=[(one.data_ptr(), len(one))], timeout_s=60)
        sending.add_done_callback(lambda _, number=number: order.append(f"out {number}"))  # type: ignore[misc]
    while len(order) < 2 * len(sizes):
        if loops[0].link.wants_to_send:
            loops[0].link.flush()
        if select.select([loops[1].link.socket], [], [], 0)[0]:
            assert loops[1].link.read()
    for direction in ("in", "out"):
        assert [one for one in order if one.startswith(direction)] == [f"{direction} {n}" for n in range(len(sizes))]
    assert all(torch.equal(one, two) for one, two in zip(sent, landed, strict=True))


def test_a_slot_that_does_not_come(loops: tuple[Any, Any]) -> None:
    """The link is late then; the exchange fails when the session has ended."""
    ring: Any = None
    lane = LinkLane(loops[1], None, ring)  # type: ignore[arg-type]
    target = torch.zeros(10, dtype=torch.uint8)
    future = lane.exchange(receives=[(target.data_ptr(), 10)], timeout_s=5)
    assert not loops[1].link.is_late(0)
    assert loops[1].link.is_late(float("inf"))
    assert not future.done()
    assert lane.abort("the session has ended").done()
    with pytest.raises(PeerGoneError, match="the session has ended"):
        future.result(0)
