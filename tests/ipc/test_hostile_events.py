"""Rings of events under failure and from many threads: no slot lost, no answer for another, nothing closed in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from doubles.fake_cuda import FakeDriver, installed
from doubles.host_files import count_fds
from kvferry.cuda.device import bound
from kvferry.cuda.memory import tensor_from_pointer
from kvferry.cuda.stream import Stream
from kvferry.errors import CudaError, DeadlineError, ShareError, UnknownDeviceError
from kvferry.ipc.events import (
    Ticket,
    encode_events,
    make_event_ring,
    make_peer_events,
    open_event_ring,
    open_events,
)
from kvferry.ipc.events.tickets import SlotPool
from kvferry.ipc.table import process_table


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    with installed() as driver:
        yield driver
        process_table().mappings.drain(20)


def test_a_look_that_fails_does_not_lose_the_slot() -> None:
    def broken(ticket: Ticket) -> bool:
        raise CudaError("cuEventQuery", 999, "no", 0)

    pool = SlotPool(1)
    pool.release(pool.take(lambda _: True, 0))
    with pytest.raises(CudaError):
        pool.take(broken, 0)
    pool.take(lambda _: True, 0.2)


def test_releasing_an_old_ticket_again_is_harmless_after_a_failed_record(fake: FakeDriver) -> None:
    with make_event_ring(0, False, 1) as ring:
        old = ring.record()
        ring.release(old)
        fake.fake.failures["cuEventRecord"] = [400]
        with pytest.raises(CudaError):
            ring.record()
        ring.release(old)
        assert ring.record(timeout_s=1).value > old.value


def test_a_thread_that_finds_the_slots_being_looked_at_looks_again() -> None:
    """The look of another thread takes the slot away for a moment; whoever comes just then must not sleep for good."""
    pool = SlotPool(1)
    pool.release(pool.take(lambda _: True, 0))
    looking, go_on = threading.Event(), threading.Event()

    def slow(ticket: Ticket) -> bool:
        looking.set()
        assert go_on.wait(10)
        return False

    def first() -> None:
        with pytest.raises(DeadlineError):
            pool.take(slow, 0)

    thread = threading.Thread(target=first)
    thread.start()
    assert looking.wait(10)
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    began = time.monotonic()
    pool.take(lambda _: True, 5)
    assert time.monotonic() - began < 3
    thread.join(10)
    timer.join()


def test_threads_that_ask_for_slots_of_a_device_page_at_once_get_their_own_answers(fake: FakeDriver) -> None:
    with bound(0) as drv:
        address = drv.mem_alloc(512)
    memory = tensor_from_pointer(address, 64, device=0, owner=None).view(torch.int64)
    events = make_peer_events(0, 8, memory=memory)
    memory[:4] = 1000  # the first four are reached, the others are not
    wrong: list[int] = []

    def ask(slot: int) -> None:
        for _ in range(150):
            if events.query(Ticket(slot, 1000)) != (slot < 4):
                wrong.append(slot)

    threads = [threading.Thread(target=ask, args=(slot,)) for slot in (0, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    events.close()
    assert not wrong


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_ring_for_a_device_that_is_not_there_leaves_nothing_open(fake: FakeDriver) -> None:
    before = count_fds()
    with make_peer_events(0, 2) as events:
        data, fds = encode_events(events)
    fields = msgspec.msgpack.decode(data)
    with pytest.raises(UnknownDeviceError):
        open_event_ring(msgspec.msgpack.encode({**fields, "device_uuid": "GPU-nowhere"}), fds)
    del events
    assert count_fds() == before


def test_a_ring_is_not_closed_under_a_record(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make_event_ring(0, False, 1)
    began, go_on = threading.Event(), threading.Event()
    real = type(fake).event_record
    failures: list[BaseException] = []

    def slow(self: FakeDriver, event: int, stream: int) -> None:
        began.set()
        assert go_on.wait(10)
        real(self, event, stream)

    def record() -> None:
        try:
            ring.record()
        except BaseException as error:  # noqa: BLE001 - given to the test
            failures.append(error)

    monkeypatch.setattr(type(fake), "event_record", slow)
    thread = threading.Thread(target=record)
    thread.start()
    assert began.wait(10)
    closer = threading.Thread(target=ring.close)
    closer.start()
    time.sleep(0.1)
    destroyed = fake.fake.calls["cuEventDestroy_v2"]
    go_on.set()
    thread.join(10)
    closer.join(10)
    assert destroyed == 0
    assert not failures
    assert fake.fake.calls["cuEventDestroy_v2"] == 1


def test_closing_and_asking_from_threads_gives_answers_or_one_error(fake: FakeDriver) -> None:
    with bound(0) as drv:
        address = drv.mem_alloc(512)
    memory = tensor_from_pointer(address, 64, device=0, owner=None).view(torch.int64)
    wrong: list[BaseException] = []
    for _ in range(10):
        events = make_peer_events(0, 8, memory=memory)

        def ask(events: object = events) -> None:
            try:
                while True:
                    events.query(Ticket(0, 1000))  # type: ignore[attr-defined]
            except ShareError:
                pass
            except BaseException as error:  # noqa: BLE001 - given to the test
                wrong.append(error)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        events.close()
        for thread in threads:
            thread.join(10)
    assert not wrong


def test_a_forged_ticket_waits_no_longer_than_its_deadline_and_holds_no_stream_for_ever(fake: FakeDriver) -> None:
    ring = make_event_ring(0, True, 2)
    with ring, open_events(*encode_events(ring)) as events, Stream(0) as stream:
        forged = Ticket(1, (1 << 62) - 1)
        with pytest.raises(DeadlineError):
            events.wait(forged, 0.05)
        events.wait_on_stream(forged, stream.handle)
        assert not stream.query()
        events.abandon()
        deadline = time.monotonic() + 10
        while not stream.query() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert stream.query()
        events.close()
        events.abandon()


def test_closing_a_stream_from_many_threads_destroys_it_once(fake: FakeDriver) -> None:
    for _ in range(20):
        stream = Stream(0)
        threads = [threading.Thread(target=stream.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert fake.fake.calls["cuStreamDestroy_v2"] == 20


@pytest.mark.parametrize("slots", [0, -1, 4097])
def test_a_ring_has_a_sane_number_of_slots(slots: int) -> None:
    with pytest.raises(ValueError, match="4096"):
        make_event_ring(None, False, slots)
