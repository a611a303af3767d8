"""The watchdog over threads' pulses."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from kvferry.server.health import Health
from kvferry.server.pulse import Pulse
from serving.process import eventually


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
