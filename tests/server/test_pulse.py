"""Signs of life of threads."""

from __future__ import annotations

import threading
import time

import pytest

from kvferry.server.watch.pulse import Pulse


def test_a_thread_that_beats_is_not_stalled() -> None:
    pulse = Pulse("disk-1")
    pulse.beat()
    assert pulse.stalled(time.monotonic(), 5.0) is None


@pytest.mark.parametrize("beats", [0, 1])
def test_silence_is_told_with_name_step_and_time(beats: int) -> None:
    pulse = Pulse("disk-1")
    for _ in range(beats):
        pulse.beat()
    where = ("its start", "its loop")[beats]
    text = pulse.stalled(time.monotonic() + 7.0, 5.0)
    assert text is not None
    assert text.startswith(f"disk-1 has been in {where} for 7.")


def test_the_innermost_step_is_told_and_the_time_runs_anew_after_it() -> None:
    pulse = Pulse("disk-1")
    with pulse.step("a write"):
        time.sleep(0.05)
        with pulse.step("open"):
            assert "in open for" in (pulse.stalled(time.monotonic() + 6.0, 5.0) or "")
        assert pulse.stalled(time.monotonic(), 0.04) is None
        assert "in a write for" in (pulse.stalled(time.monotonic() + 6.0, 5.0) or "")
    pulse.beat()
    assert "its loop" in repr(pulse)


def test_a_step_that_fails_ends_too() -> None:
    pulse = Pulse("disk-1")
    pulse.beat()
    with pytest.raises(OSError, match="gone"), pulse.step("a write"):
        raise OSError("gone")
    assert "its loop" in repr(pulse)


def test_another_thread_sees_where_it_hangs() -> None:
    pulse, there, go_on = Pulse("disk-1"), threading.Event(), threading.Event()

    def hang() -> None:
        with pulse.step("fsync"):
            there.set()
            go_on.wait(10)

    thread = threading.Thread(target=hang)
    thread.start()
    assert there.wait(10)
    assert "disk-1 has been in fsync" in (pulse.stalled(time.monotonic() + 1.0, 0.5) or "")
    go_on.set()
    thread.join()


def test_a_step_may_have_a_limit_of_its_own_but_not_a_shorter_one() -> None:
    pulse = Pulse("remote-1")
    with pulse.step("a call", 20.0):
        assert pulse.stalled(time.monotonic() + 19.0, 5.0) is None
        assert pulse.stalled(time.monotonic() + 22.0, 5.0)
        assert pulse.stalled(time.monotonic() + 22.0, 30.0) is None
    assert pulse.stalled(time.monotonic() + 6.0, 5.0)
