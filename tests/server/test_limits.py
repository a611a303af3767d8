"""Limits of memory: named before memory is taken, and when it cannot be pinned; a large pool is no reason to wait."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from doubles import copy_kernel
from doubles.fake_cuda import installed
from kvferry.client import CacheClient
from kvferry.errors import KVFerryError, ShareError
from kvferry.server import CacheServer, ServerConfig, assembly
from kvferry.server.limits import check_memory, what_limits_pinning
from kvferry.server.work.device import HostDevice
from serving.process import eventually

NOWHERE = Path("/nowhere")  # where no other limits are found


@pytest.fixture
def set_soft() -> Iterator[Callable[[int, int], None]]:
    """Sets soft limits of this process, for the time of a test."""
    with contextlib.ExitStack() as undo:

        def set_soft(limit: int, value: int) -> None:
            before = resource.getrlimit(limit)
            undo.callback(resource.setrlimit, limit, before)
            resource.setrlimit(limit, (value, before[1]))

        yield set_soft


@pytest.mark.parametrize(
    ("limit", "words"),
    [(resource.RLIMIT_AS, "RLIMIT_AS, `ulimit -v`"), (resource.RLIMIT_FSIZE, "RLIMIT_FSIZE, `ulimit -f`")],
)
def test_limits_of_the_process_are_named(set_soft: Callable[[int, int], None], limit: int, words: str) -> None:
    check_memory(1 << 50, NOWHERE)
    set_soft(limit, 1 << 40)
    check_memory(1 << 40, NOWHERE)
    with pytest.raises(ShareError, match=f"{words}.*: give less memory, or raise that limit"):
        check_memory((1 << 40) + 1, NOWHERE)


def test_addresses_that_are_in_use_count(set_soft: Callable[[int, int], None], tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/statm").write_text("1000 1 1 1 0 1 0\n")
    set_soft(resource.RLIMIT_AS, 1 << 40)
    check_memory((1 << 40) - 1000 * resource.getpagesize(), tmp_path)
    with pytest.raises(ShareError, match="what is left of the limit of addresses"):
        check_memory((1 << 40) - 999 * resource.getpagesize(), tmp_path)


def test_the_smallest_limit_is_named(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod\n")
    (tmp_path / "sys/fs/cgroup/pod").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/pod/memory.max").write_text("1048576\n")
    assert "sys/fs/cgroup/pod/memory.max is 1048576 bytes" in what_limits_pinning(tmp_path)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  2048 kB\n")
    with pytest.raises(ShareError, match=r"memory\.max is 1048576"):
        check_memory(1 << 21, tmp_path)
    (tmp_path / "sys/fs/cgroup/pod/memory.max").write_text("max\n")
    check_memory(1 << 21, tmp_path)
    with pytest.raises(ShareError, match="MemAvailable"):
        check_memory((1 << 21) + 1, tmp_path)


def test_a_server_starts_with_little_lockable_memory_where_nothing_is_locked(
    set_soft: Callable[[int, int], None], tmp_path: Path
) -> None:
    set_soft(resource.RLIMIT_MEMLOCK, 64 << 10)
    assert what_limits_pinning(NOWHERE) == "the limit of locked memory (memlock, `ulimit -l`) is 64 KiB"
    config = ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=4 << 20, device="cpu")
    with CacheServer(config), CacheClient(config.socket_path) as client:
        eventually(lambda: client.stats()["memory_bytes"] == 4 << 20)


def test_memory_that_cannot_be_pinned_ends_the_server_with_the_limits_named(tmp_path: Path) -> None:
    with installed() as driver:
        copy_kernel.install(driver)
        driver.fake.failures["cuMemHostRegister_v2"] = [2]  # out of memory
        config = ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=1 << 20, device="cuda")
        server = CacheServer(config)
        server.start()
        eventually(lambda: not server.running)
        with pytest.raises(KVFerryError, match=r"1048576 bytes of memory cannot be pinned.*memlock, `ulimit -l`"):
            server.stop()


def test_a_large_pool_answers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 GiB, of which none is touched here: the server must not wait for its memory to be ready."""
    go_on = threading.Event()
    monkeypatch.setattr(HostDevice, "prepare", lambda *_: go_on.wait(30))
    monkeypatch.setattr(assembly, "check_memory", lambda _: None)
    config = ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=20 << 30, device="cpu")
    started = time.monotonic()
    server = CacheServer(config)
    server.start()
    try:
        with CacheClient(config.socket_path) as client:
            client.ping()
            assert time.monotonic() - started < 2
            assert client.stats()["memory_bytes"] == 0
    finally:
        go_on.set()
        server.stop()
