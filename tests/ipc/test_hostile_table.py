"""The table of mappings under races, failures, forks and interrupts; and what is left at the end."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from doubles.host_files import count_fds, foreign_file, import_file
from kvferry.errors import ShareError, StaleHandleError
from kvferry.ipc.mapping_records import MappingKey, Opened
from kvferry.ipc.mappings import MappingTable
from kvferry.ipc.table import process_table

KEY = MappingKey(b"e" * 16, 7, b"h" * 64)


@pytest.fixture
def table() -> Iterator[MappingTable]:
    table = MappingTable()
    yield table
    table.drain(timeout_s=10)
    assert table.stats().mapped == 0


@pytest.fixture
def switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def nothing() -> Opened:
    return Opened(1, 1, lambda: None)


def test_without_a_thread_that_unmaps_nothing_is_mapped_and_the_next_tries_again(
    table: MappingTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ShareError, match="no thread can be started"):
            table.acquire(KEY, nothing)
    assert table.stats().mapped == 0
    table.acquire(KEY, nothing, timeout_s=1).release()
    table.drain(5)


@contextlib.contextmanager
def _revived_while_released(table: MappingTable) -> Iterator[None]:
    """Release KEY's mapping while the unmapper is busy with another; it is in use again a moment later, to the end."""
    busy, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow_close() -> None:
        busy.set()
        assert go_on.wait(30)

    other = table.acquire(KEY._replace(handle=b"o" * 64), lambda: Opened(2, 2, slow_close))
    held = table.acquire(KEY, nothing)
    other.release()
    assert busy.wait(30)
    held.release()

    def revive() -> None:
        time.sleep(0.2)
        again = table.acquire(KEY, nothing)
        go_on.set()
        assert ended.wait(50)
        again.release()

    thread = threading.Thread(target=revive)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)


def test_drain_does_not_wait_for_what_is_in_use_again(table: MappingTable) -> None:
    busy = table.acquire(KEY._replace(handle=b"z" * 64), nothing)
    with _revived_while_released(table):
        with table._lock:  # KEY is looked at first
            table._entries = dict(sorted(table._entries.items()))
        began = time.monotonic()
        table.drain(40)
        assert time.monotonic() - began < 30  # not by its deadline
    busy.release()


def test_who_waits_for_a_stale_mapping_is_told_when_it_is_in_use_again(table: MappingTable) -> None:
    with _revived_while_released(table):
        began = time.monotonic()
        with pytest.raises(StaleHandleError):
            table.acquire(KEY._replace(buffer_id=8), nothing, timeout_s=40)
        assert time.monotonic() - began < 30  # not by its deadline


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit])
def test_any_exception_in_an_opener_leaves_nothing(table: MappingTable, error: type[BaseException]) -> None:
    def interrupted() -> Opened:
        raise error

    with pytest.raises(error):
        table.acquire(KEY, interrupted)
    assert table.stats().mapped == 0
    table.acquire(KEY, nothing, timeout_s=1).release()


@pytest.mark.usefixtures("switching")
def test_threads_that_open_share_drop_and_collect_never_meet_a_closed_mapping(table: MappingTable) -> None:
    open_now: dict[bytes, int] = {}
    wrong: list[str] = []
    lock = threading.Lock()

    def opener(handle: bytes) -> Opened:
        with lock:
            open_now[handle] = open_now.get(handle, 0) + 1
            if open_now[handle] != 1:
                wrong.append("twice")

        def close() -> None:
            with lock:
                open_now[handle] -= 1

        return Opened(1, 1, close)

    def work(seed: int) -> None:
        for turn in range(400):
            handle = b"%d" % ((turn + seed) % 3)
            ref = table.acquire(KEY._replace(handle=handle), partial(opener, handle))
            second = ref.share()
            cycle: list[object] = [second]
            cycle.append(cycle)
            del second, cycle
            if turn % 50 == 0:
                gc.collect()
            if open_now.get(handle) != 1:
                wrong.append("not open")
            ref.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    gc.collect()
    table.drain(10)
    assert not wrong
    assert not any(open_now.values())


def test_thousands_of_cycles_leave_threads_descriptors_and_objects_as_they_were() -> None:
    table = process_table().mappings
    others = [thread for thread in threading.enumerate() if thread is not table._unmapper]

    def cycles(number: int) -> None:
        for turn in range(number):
            with foreign_file(4096) as fd, import_file(fd, shape=(turn % 97 + 1,), nbytes=turn % 97 + 1) as wrapper:
                tensor = wrapper.to_tensor()
            del tensor
        gc.collect()
        table.drain(10)

    def unmappers() -> int:
        # Of this table; other tests' threads may end meanwhile.
        return sum(thread not in others for thread in threading.enumerate())

    cycles(300)
    before = (count_fds(), unmappers(), table.stats().mapped)
    objects = len(gc.get_objects())
    cycles(2000)
    assert (count_fds(), unmappers(), table.stats().mapped) == before
    assert len(gc.get_objects()) < objects + 200


_PRELUDE = """
import os, sys, threading, time, fcntl, signal
import torch
from kvferry import ipc
from kvferry.ipc.host import HostDescriptor
from kvferry.ipc.table import process_table
from kvferry.ipc.shared_memory import FileIdentity

def imported(n=4096):
    fd = os.memfd_create("peer", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, n)
    fcntl.fcntl(fd, 1033, 2)
    i = FileIdentity.of(fd)
    w = ipc.HostIPCWrapper.from_descriptor(HostDescriptor(dtype="uint8", shape=(n,), stride=(1,), storage_offset=0,
        device_uuid="", exporter=b"p" * 16, file_size=n, offset=0, nbytes=n, file_device=i.device, inode=i.inode))
    w.import_fd(0, fd)
    return w
"""


def run(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own; it must end by itself, well, and silently."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", _PRELUDE + code], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", ""), done.stderr[-2000:]
    return done


def test_the_interpreter_ends_silently_whatever_is_still_open() -> None:
    run(
        "keep = [imported() for _ in range(5)]; tensors = [w.to_tensor() for w in keep]\n"
        "for w in keep: w.close()\n"
        "cycle = [imported().to_tensor]; cycle[0].__self__.close(); cycle.append(cycle)\n"
        "shared = ipc.allocate_shared((1000,)); mine = ipc.HostIPCWrapper(shared)\n"
        "ring = ipc.make_event_ring(None, False, 4)\n"
        "events = ipc.open_events(*ipc.encode_events(ring)); ring.close(); events.close()\n"
        "module = sys.modules['kvferry']; module.kept = (tensors, shared, mine, ring, events)\n",
        "-X",
        "dev",
        "-W",
        "error",
        "-W",
        "ignore::DeprecationWarning:torch",
    )


def test_optimised_bytecode_keeps_every_check() -> None:
    run(
        "w = imported(); t = w.to_tensor(); assert False\n"
        "from kvferry.errors import WireError\n"
        "for bad in (b'', b'x', ipc.encode_descriptors([w])[:-1]):\n"
        "    try: ipc.decode(bad)\n"
        "    except WireError: continue\n"
        "    sys.exit(3)\n"
        "try: ipc.HostIPCWrapper.from_descriptor(object())\n"
        "except TypeError: pass\n"
        "else: sys.exit(4)\n"
        "w.close(); del t; process_table().mappings.drain()\n"
        "sys.exit(process_table().mappings.stats().mapped)\n",
        "-O",
    )


def test_a_fork_while_every_lock_is_held_leaves_the_child_usable() -> None:
    """As a fork does that comes while other threads are inside: their locks stay locked in the child."""
    run(
        "w = imported(); w.to_tensor(); s = ipc.allocate_shared((4,), torch.int32)\n"
        "from kvferry.cuda import driver as d\n"
        "table = process_table()\n"
        "d.load_driver(); holder = d._holder()\n"
        "for lock in (table.mappings._lock, table._lock, table.segments._lock, holder.lock): lock.acquire()\n"
        "signal.alarm(40)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    signal.alarm(10)\n"
        "    t = w.to_tensor(); t.fill_(1); del t; w.close()\n"
        "    assert d.load_driver() is None\n"
        "    x = imported(); x.to_tensor().fill_(2); x.close()\n"
        "    process_table().mappings.drain(5)\n"
        "    mine = ipc.HostIPCWrapper(s); got = ipc.decode(*ipc.encode([mine])); got[0].to_tensor(); got[0].close()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "os._exit(0)\n",
        "-W",
        "ignore::DeprecationWarning",
    )
