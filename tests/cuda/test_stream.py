from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from doubles.fake_cuda import FakeDriver, installed
from kvferry.cuda.device import bound
from kvferry.cuda.memory import tensor_from_pointer
from kvferry.cuda.stream import Event, Stream, beside_captures, synchronize_device, wait_value64, write_value64
from kvferry.errors import CudaError


@pytest.fixture
def double() -> Iterator[FakeDriver]:
    with installed() as driver:
        yield driver


@pytest.fixture
def words(double: FakeDriver) -> int:
    """The address of a few zeroed 64-bit words on the device."""
    with bound(0) as drv:
        return drv.mem_alloc(64)


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_work_runs_in_order_and_an_event_marks_its_end(words: int) -> None:
    with Stream(0) as stream, Event(0) as event:
        stream.memset_async(words, 7, 32)
        stream.memcpy_async(words + 32, words, 8)
        event.record(stream.handle)
        event.synchronize()
        assert event.query()
        assert stream.query()
    bytes_ = tensor_from_pointer(words, 64, device=0, owner=None).tolist()
    assert bytes_ == [7] * 40 + [0] * 24


def test_a_stream_waits_for_a_value_and_no_other_stream_does(words: int) -> None:
    with Stream(0) as held, Stream(0) as free, Event(0) as event:
        wait_value64(held.handle, words, 5, device=0)
        event.record(held.handle)
        write_value64(free.handle, words, 4, device=0)
        free.synchronize()
        assert not event.query()
        assert not held.query()
        write_value64(free.handle, words, 6, device=0)
        assert until(event.query)
        synchronize_device(0)


def test_one_stream_waits_for_anothers_event(words: int) -> None:
    with Stream(0) as first, Stream(0) as second, Event(0) as event:
        wait_value64(first.handle, words, 1, device=0)
        event.record(first.handle)
        event.wait_on_stream(second.handle)
        assert not second.query()
        with Stream(0) as other:
            write_value64(other.handle, words, 1, device=0)
            second.synchronize()
        assert event.query()


def test_only_an_interprocess_event_gives_a_handle(double: FakeDriver) -> None:
    with Event(0, interprocess=True) as event:
        assert len(event.ipc_handle()) == 64
    with Event(0) as event, pytest.raises(CudaError):
        event.ipc_handle()
    with pytest.raises(ValueError, match="64 bytes"):
        Event.from_ipc_handle(b"short", 0)


def test_closing_twice_is_once_and_an_unclosed_stream_is_warned_about(double: FakeDriver) -> None:
    stream = Stream(0)
    stream.close()
    stream.close()
    assert stream.closed
    assert "closed" in repr(stream)
    unclosed = Stream(0)
    with pytest.warns(ResourceWarning, match="was not closed"):
        unclosed.__del__()
    unclosed.close()


def test_a_thread_is_relaxed_beside_captures_and_as_before_after(double: FakeDriver) -> None:
    modes: list[int] = []

    def run() -> None:
        with beside_captures(0):
            modes.append(double.fake.capture_mode.value)
        modes.append(double.fake.capture_mode.value)

    thread = threading.Thread(target=run)  # one that has no context
    thread.start()
    thread.join(10)
    assert modes == [2, 0]
