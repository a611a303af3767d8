"""Error objects, and streams that are cut into whole events."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.replies import EventCutter, error_body, error_event, error_in_event


def test_an_error_is_an_object_as_clients_of_openai_know_it() -> None:
    error = json.loads(error_body(400, "n must be 1", code="invalid_request", param="n"))["error"]
    assert error == {"message": "n must be 1", "type": "invalid_request_error", "param": "n", "code": "invalid_request"}
    assert json.loads(error_body(502, "x", code="y"))["error"]["type"] == "server_error"


def test_an_error_within_a_stream_is_one_event() -> None:
    event = error_event(502, "two\nlines", code="engine_failed")
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (b'data: {"error": {"message": "x", "code": 500}}\n\n', 500),
        (b'data: {"error":{"code":400}}\n\ndata: [DONE]\n\n', 400),
        (b'data: {"error": {"code": "words"}}\n\n', 500),
        (b'data: {"id": "1", "error": null}\n\n', None),
        (b'data: {"error": null}\n\n', None),
        (b'data: {"error": {"co', None),
        (b"", None),
        (b"data: [DONE]\n\n", None),
    ],
)
def test_an_engines_error_at_the_beginning_of_a_stream_is_seen(event: bytes, status: int | None) -> None:
    assert error_in_event(event) == status


@given(st.lists(st.sampled_from([b"data: x", b"\n", b"\r\n", b"\n\n", b"\r\n\r\n", b"y"]), max_size=30))
def test_all_bytes_go_through_and_breaks_are_between_events(parts: list[bytes]) -> None:
    cutter, passed = EventCutter(), b""
    for part in parts:
        passed += cutter.feed(part)
        assert passed == b"" or passed.endswith((b"\n\n", b"\r\n\r\n"))
    rest = cutter.rest()
    assert passed + rest == b"".join(parts)
    assert b"\n\n" not in rest
    assert b"\r\n\r\n" not in rest


def test_an_event_that_is_very_long_goes_through_in_parts() -> None:
    cutter = EventCutter()
    assert cutter.feed(b"x" * (1 << 20)) == b""
    assert len(cutter.feed(b"x")) == (1 << 20) + 1
    assert cutter.rest() == b""
