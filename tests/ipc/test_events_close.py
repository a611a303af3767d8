"""Closing rings while other threads are inside: given back once, by the close that finds them gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvferry.errors import DeadlineError
from kvferry.ipc.events import base, encode_events, make_event_ring, open_events


def test_a_close_that_came_too_early_is_finished_by_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_CLOSE_TIMEOUT_S", 0.05)
    ring = make_event_ring(None, False, 4)
    peer = open_events(*encode_events(ring))
    given_back: list[object] = []
    for end in (ring, peer):
        monkeypatch.setattr(end, "_close", partial(_note, given_back, end, end._close))
        with end._gate, pytest.raises(DeadlineError, match="1 calls"):
            end.close()
        assert end.closed
        assert end not in given_back
        end.close()
        end.close()
    assert given_back == [ring, peer]


def _note(given_back: list[object], end: object, give_back: Callable[[], None]) -> None:
    given_back.append(end)
    give_back()
