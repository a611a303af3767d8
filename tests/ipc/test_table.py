from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.errors import DeadlineError, ShareError, StaleHandleError
from kvferry.ipc.mapping_records import MappingKey, Opened
from kvferry.ipc.mappings import MappingTable
from kvferry.ipc.table import LocalExport, ProcessTable, process_table

KEY = MappingKey(b"e" * 16, 7, b"h" * 64)


class Opener:
    """Counts what it opens and closes; can hold or fail either."""

    def __init__(self) -> None:
        self.opens = 0
        self.closes = 0
        self.may_open = threading.Event()
        self.may_close = threading.Event()
        self.opening = threading.Event()
        self.closing = threading.Event()
        self.may_open.set()
        self.may_close.set()
        self.error: Exception | None = None

    def __call__(self) -> Opened:
        self.opening.set()
        assert self.may_open.wait(10)
        if self.error is not None:
            raise self.error
        self.opens += 1
        return Opened(0x1000 * self.opens, 4096, self.close)

    def close(self) -> None:
        self.closing.set()
        assert self.may_close.wait(10)
        self.closes += 1


@pytest.fixture
def table() -> Iterator[MappingTable]:
    table = MappingTable()
    yield table
    table.drain(timeout_s=10)
    assert table.stats().mapped == 0


@pytest.fixture
def opener() -> Opener:
    return Opener()


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:  # noqa: BLE001 - given to the test
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_one_open_for_two_uses_and_one_close_after_the_last(table: MappingTable, opener: Opener) -> None:
    first = table.acquire(KEY, opener)
    second = table.acquire(KEY, opener)
    assert (first.address, first.nbytes) == (second.address, second.nbytes) == (0x1000, 4096)
    assert table.stats()[:4] == (1, 2, 4096, 1)
    first.release()
    first.release()
    table.drain()
    assert (opener.opens, opener.closes) == (1, 0)
    second.release()
    table.drain()
    assert (opener.opens, opener.closes) == (1, 1)


def test_a_shared_use_counts_on_its_own(table: MappingTable, opener: Opener) -> None:
    first = table.acquire(KEY, opener)
    shared = first.share()
    first.release()
    table.drain()
    assert opener.closes == 0
    with pytest.raises(ShareError, match="released"):
        first.share()
    shared.release()
    table.drain()
    assert opener.closes == 1


def test_a_use_that_is_dropped_is_released(table: MappingTable, opener: Opener) -> None:
    ref = table.acquire(KEY, opener)
    del ref
    gc.collect()
    table.drain()
    assert opener.closes == 1


def test_a_mapping_opens_again_after_its_close(table: MappingTable, opener: Opener) -> None:
    table.acquire(KEY, opener).release()
    table.drain()
    table.acquire(KEY, opener).release()
    table.drain()
    assert (opener.opens, opener.closes) == (2, 2)


def test_a_release_that_is_still_queued_does_not_close_what_is_acquired_again(
    table: MappingTable, opener: Opener
) -> None:
    for _ in range(200):
        old = table.acquire(KEY, opener)
        old.release()
        new = table.acquire(KEY, opener)
        assert opener.closes < opener.opens
        new.release()
        table.drain()


def test_others_wait_for_an_open_and_not_for_the_table(table: MappingTable, opener: Opener) -> None:
    opener.may_open.clear()
    first, results = in_thread(lambda: table.acquire(KEY, opener))
    assert opener.opening.wait(10)
    second, more = in_thread(lambda: table.acquire(KEY, opener))
    other = table.acquire(KEY._replace(handle=b"o" * 64), Opener())  # not held up
    time.sleep(0.05)
    assert results == more == []
    opener.may_open.set()
    first.join(10)
    second.join(10)
    assert opener.opens == 1
    assert table.stats().references == 3
    for ref in (other, *results, *more):
        ref.release()  # type: ignore[attr-defined]
    del results[:], more[:]


def test_who_waits_for_an_open_has_a_deadline(table: MappingTable, opener: Opener) -> None:
    opener.may_open.clear()
    thread, results = in_thread(lambda: table.acquire(KEY, opener))
    assert opener.opening.wait(10)
    with pytest.raises(DeadlineError, match="opening"):
        table.acquire(KEY, opener, timeout_s=0.05)
    opener.may_open.set()
    thread.join(10)
    results.clear()


def test_a_failed_open_leaves_nothing_and_the_next_tries_again(table: MappingTable, opener: Opener) -> None:
    opener.error = ShareError("no")
    for _ in range(2):
        with pytest.raises(ShareError, match="no"):
            table.acquire(KEY, opener)
    assert table.stats()[:3] == (0, 0, 0)
    opener.error = None
    table.acquire(KEY, opener).release()


def test_after_a_failed_open_a_waiter_opens_itself(table: MappingTable, opener: Opener) -> None:
    opener.may_open.clear()
    opener.error = ShareError("no")
    first, results = in_thread(lambda: table.acquire(KEY, opener))
    assert opener.opening.wait(10)
    good = Opener()
    second, more = in_thread(lambda: table.acquire(KEY, good))
    opener.may_open.set()
    first.join(10)
    second.join(10)
    assert isinstance(results[0], ShareError)
    assert good.opens == 1
    more.clear()


def test_who_comes_while_it_closes_waits_and_opens_anew(table: MappingTable, opener: Opener) -> None:
    opener.may_close.clear()
    table.acquire(KEY, opener).release()
    assert opener.closing.wait(10)
    with pytest.raises(DeadlineError, match="closing"):
        table.acquire(KEY, opener, timeout_s=0.05)
    with pytest.raises(DeadlineError, match="not unmapped"):
        table.drain(timeout_s=0.05)
    thread, results = in_thread(lambda: table.acquire(KEY, opener))
    opener.may_close.set()
    thread.join(10)
    assert (opener.opens, opener.closes) == (2, 1)
    results.clear()


def test_the_same_handle_of_another_allocation_is_refused_while_in_use(table: MappingTable, opener: Opener) -> None:
    old = table.acquire(KEY, opener)
    remade = KEY._replace(buffer_id=8)
    with pytest.raises(StaleHandleError, match=r"allocation 8.*allocation 7"):
        table.acquire(remade, opener)
    with pytest.raises(StaleHandleError):
        table.acquire(KEY._replace(exporter=b"f" * 16), opener)
    old.release()
    fresh = table.acquire(remade, opener)  # waits for the old one's close
    assert (opener.opens, opener.closes) == (2, 1)
    assert fresh.address == 0x2000
    fresh.release()


def test_a_failed_close_is_logged_and_counted_and_not_raised(
    table: MappingTable, caplog: pytest.LogCaptureFixture
) -> None:
    def close() -> None:
        raise ShareError("the driver says no")

    with caplog.at_level(logging.ERROR):
        table.acquire(KEY, lambda: Opened(1, 2, close)).release()
        table.drain()
    assert "could not unmap" in caplog.text
    assert "the driver says no" in caplog.text
    assert table.stats().close_failures == 1


def test_four_threads_open_and_close_a_thousand_times(table: MappingTable) -> None:
    open_now: list[int] = []
    wrong: list[str] = []
    lock = threading.Lock()

    def opener() -> Opened:
        with lock:
            if open_now:
                wrong.append("opened twice")
            open_now.append(1)

        def close() -> None:
            with lock:
                open_now.pop()

        return Opened(1, 1, close)

    def work() -> None:
        for _ in range(1000):
            ref = table.acquire(KEY, opener)
            if not open_now:
                wrong.append("not open")
            ref.release()

    threads = [in_thread(work)[0] for _ in range(4)]
    for thread in threads:
        thread.join(30)
    table.drain()
    assert not wrong
    assert not open_now


def test_the_unmapper_ends_when_nothing_is_mapped(table: MappingTable, opener: Opener) -> None:
    table.acquire(KEY, opener).release()
    table.drain()
    deadline = time.monotonic() + 10
    while table._unmapper is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert table._unmapper is None
    table.acquire(KEY, opener).release()  # and begins again


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_new_token_and_an_empty_table() -> None:
    process = process_table()
    opener = Opener()
    ref = process.mappings.acquire(KEY, opener)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        ref.release()
        stats = process.mappings.stats()
        os.write(write_end, b"%s %d %d" % (process.token.hex().encode(), stats.mapped, opener.closes))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as reader:
        token, mapped, closes = reader.read().split()
    os.waitpid(pid, 0)
    assert token != process.token.hex()
    assert (mapped, closes) == ("0", "0")
    assert process.mappings.stats().mapped == 1
    ref.release()
    process.mappings.drain()
    assert opener.closes == 1


def test_exports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.ipc.table._MAX_EXPORTS", 3)
    table = ProcessTable()
    for i in range(5):
        table.add_export(b"%d" % i, LocalExport(i, i, i, 0))
    assert list(table.exports) == [b"2", b"3", b"4"]


def test_a_segment_is_found_by_any_range_inside_it_while_it_lives() -> None:
    class Segment:
        pass

    table = ProcessTable()
    segment = Segment()
    table.segments.add(1000, 100, segment)
    assert table.segments.find(1000, 100) is segment
    assert table.segments.find(1050) is segment
    assert table.segments.find(1050, 60) is None
    assert table.segments.find(999, 2) is None
    del segment
    gc.collect()
    assert table.segments.find(1050) is None


def test_the_process_ends_after_its_unmapping(tmp_path: Path) -> None:
    """A thread in a driver call while the interpreter goes away ends the process with SIGABRT or SIGSEGV."""
    code = (
        "import pathlib, time\n"
        "from kvferry.ipc.mapping_records import MappingKey, Opened\n"
        "from kvferry.ipc.table import process_table\n"
        "def close():\n"
        "    time.sleep(0.5)\n"
        f"    pathlib.Path({str(tmp_path / 'closed')!r}).touch()\n"
        "key = MappingKey(bytes(16), 1, b'handle')\n"
        "process_table().mappings.acquire(key, lambda: Opened(4096, 1, close)).release()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert (tmp_path / "closed").exists()
