"""The watchdog over threads' pulses."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import pytest

from doubles.memory_tier import MemoryTier
from kvferry.errors import TierUnavailableError
from kvferry.server.watch.health import Health, Report
from kvferry.server.watch.pulse import Pulse
from serving.process import eventually
from tier_bench import TierBench


def look(health: Health) -> bool:
    """Whether a look, now if it is time to, finds it healthy."""
    health.tick(time.monotonic())
    return health.report.healthy


def test_a_thread_that_hangs_is_unhealthy_until_it_moves(caplog: pytest.LogCaptureFixture) -> None:
    health, pulse, go_on = Health(0.2), Pulse("disk-0"), threading.Event()
    health.watch(lambda: [pulse])

    def work() -> None:
        with pulse.step("WriteChunk"):
            go_on.wait(10)
        while not health.report.healthy:
            pulse.beat()
            time.sleep(0.01)

    assert look(health)
    thread = threading.Thread(target=work)
    thread.start()
    with caplog.at_level(logging.WARNING):
        eventually(lambda: not look(health))
        assert health.report.reasons[0].startswith("disk-0 has been in WriteChunk for 0.")
        assert health.values() == {"healthy": 0.0}
        go_on.set()
        eventually(lambda: look(health))
    thread.join()
    assert health.report == (True, (), ())
    assert health.values() == {"healthy": 1.0}
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["unhealthy", "healthy again"]


def test_all_reasons_are_told_and_threads_that_come_and_go_are_followed() -> None:
    pulses = [Pulse("one"), Pulse("two")]
    health = Health(5.0)
    health.watch(lambda: pulses)
    later = time.monotonic() + 10.0
    health.tick(later)
    assert [reason.partition(" ")[0] for reason in health.report.reasons] == ["one", "two"]
    pulses.pop()
    health.tick(later + 1.0)
    assert [reason.partition(" ")[0] for reason in health.report.reasons] == ["one"]


def test_what_has_failed_for_good_stays() -> None:
    health = Health(5.0)
    health.fail("cuda:0: an illegal address")
    for seconds in range(3):
        health.tick(time.monotonic() + seconds)
        assert health.report == (False, ("cuda:0: an illegal address",), ())


def test_what_the_server_does_without_is_a_warning() -> None:
    health, pulse = Health(5.0), Pulse("remote-1")
    health.watch(lambda: [pulse], mild=True)
    health.tick(time.monotonic() + 10.0)
    assert health.report.healthy
    assert health.report.warnings[0].startswith("remote-1 has been in")


def test_work_of_the_disk_that_does_not_move_is_unhealthy_and_a_pause_is_a_warning() -> None:
    disk = MemoryTier()
    with contextlib.closing(TierBench(8, disk=disk)) as bench:
        bench.settle()
        health = Health(5.0)
        health.watch(lambda: [each for each in bench.tiers.pulses(remote=False) if not isinstance(each, Pulse)])
        health.note(bench.tiers.warnings)

        def look(later_s: float) -> Report:
            bench.tick(later_s)
            health.tick(time.monotonic() + bench.later_s)
            return health.report

        assert look(60.0) == (True, (), ())  # nothing to do
        disk.stop("write")
        bench.store("a")
        assert look(1.0).healthy
        report = look(6.0)
        assert not report.healthy
        assert report.reasons[0].startswith("the disk tier has ended none of its ")
        disk.let_go()
        bench.settle()
        assert look(1.0) == (True, (), ())
        disk.failures["write"] = TierUnavailableError("the disk is gone")
        bench.store("bcde")
        bench.until(lambda: bench.values()["disk_paused"] == 1)
        report = look(8.0)
        assert report.healthy
        assert report.warnings == (
            "the disk tier is left alone, as it failed several times in a row: the disk is gone",
        )
        disk.failures.clear()
        assert look(3.0).warnings == ()
