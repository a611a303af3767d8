"""Engines and routers that die, hang and refuse, in mid-request."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from router.fleet import PATH, PLAIN, Engine, Fleet, Router, eventually, texts

QUICK = ("--engine-timeout", "2")


def ask(router: Router, streaming: bool) -> Any:
    """The answering engine's name, or the error's code."""
    if not streaming:
        reply = router.post().json()
        return reply.get("engine") or reply["error"]["code"]
    with router.stream() as streamed:
        found = streamed.read()
    if streamed.headers["content-type"] == "application/json":
        return json.loads(found)["error"]["code"]
    events = texts(streamed)
    assert len(events) == 5
    assert events[-1] == "[DONE]"
    return events[0]["engine"]


@pytest.fixture(params=[False, True], ids=["at_once", "streaming"])
def streaming(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


def two_prefills(fleet: Fleet, *flags: str) -> tuple[list[Engine], Engine, Router]:
    prefills, decode = [fleet.engine("p1"), fleet.engine("p2")], fleet.engine("d")
    named = [word for one in prefills for word in ("--prefill", one.flag)]
    router = fleet.router(*named, "--decode", decode.flag, *flags)
    router.await_engines(2, 1)
    return prefills, decode, router


def two_decodes(fleet: Fleet, *flags: str) -> tuple[Engine, list[Engine], Router]:
    prefill, decodes = fleet.engine("p"), [fleet.engine("d1"), fleet.engine("d2")]
    named = [word for one in decodes for word in ("--decode", one.flag)]
    router = fleet.router("--prefill", prefill.flag, *named, *flags)
    router.await_engines(1, 2)
    return prefill, decodes, router


def test_a_prefill_engine_killed_before_its_answer_is_replaced_and_the_transfer_is_another(
    fleet: Fleet, streaming: bool
) -> None:
    prefills, decode, router = two_prefills(fleet)
    for one in (*prefills, decode):
        one.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(ask, router, streaming)
        eventually(lambda: decode.states() == ["open"] and any(one.states() == ["open"] for one in prefills))
        first, second = prefills if prefills[0].seen() else prefills[::-1]
        first.kill()
        eventually(lambda: second.states() == ["open"])
        eventually(lambda: decode.states() == ["aborted", "open"])
        second.tell(hold=False)
        decode.tell(hold=False)
        assert reply.result() == "d"
    ids = [one["body"]["kv_transfer_params"]["transfer_id"] for one in decode.seen()]
    assert ids[0] != ids[1] == second.seen()[0]["body"]["kv_transfer_params"]["transfer_id"]
    assert router.measure('retries_total{failed="prefill"}') == 1


def test_the_only_prefill_engine_killed_leaves_the_decode_engine_alone(fleet: Fleet, streaming: bool) -> None:
    prefill, decode, router = fleet.pair()
    for one in (prefill, decode):
        one.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(ask, router, streaming)
        eventually(lambda: prefill.states() == decode.states() == ["open"])
        prefill.kill()
        eventually(lambda: len(decode.seen()) >= 2 and "kv_transfer_params" not in decode.seen()[-1]["body"])
        decode.tell(hold=False)
        assert reply.result() == "d"
    assert ask(router, streaming) == "d"


def test_a_prefill_engine_killed_after_the_first_byte_is_no_matter(fleet: Fleet) -> None:
    prefill, decode, router = fleet.pair()
    prefill.tell(hold=True)
    decode.tell(events=2, hang_at=1)
    with router.stream() as reply:
        chunks = reply.iter_raw()
        assert b'"number": 0' in next(chunks)
        prefill.kill()
        eventually(lambda: router.measure("requests_going_on") == 1)
        assert decode.states() == ["open"]


def test_a_prefill_engine_that_fails_is_tried_three_times_and_then_done_without(fleet: Fleet) -> None:
    prefill, decode, router = fleet.pair()
    prefill.tell(status=500)
    decode.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(router.post)
        eventually(lambda: decode.states() == ["aborted"] * 3 + ["open"])
        decode.tell(hold=False)
        assert reply.result().json()["engine"] == "d"
    assert len(prefill.seen()) == 3
    assert "kv_transfer_params" not in decode.seen()[-1]["body"]
    assert router.measure('alone_total{reason="prefill_failed"}') == 1


def test_what_a_prefill_engine_refuses_the_decode_engine_decides(fleet: Fleet) -> None:
    prefill, decode, router = fleet.pair()
    prefill.tell(status=400)
    decode.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(router.post)
        eventually(lambda: decode.states() == ["aborted", "open"])
        decode.tell(hold=False)
        assert reply.result().json()["engine"] == "d"
    assert len(prefill.seen()) == 1
    decode.tell(status=400)
    assert router.post().status_code == 400


def test_where_a_prefill_engine_sends_nothing_the_decode_engine_does_not_wait_for_it(
    fleet: Fleet, streaming: bool
) -> None:
    prefill, decode, router = fleet.pair()
    prefill.tell(sends=False)
    decode.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(ask, router, streaming)
        eventually(lambda: decode.states() == ["aborted", "open"])
        decode.tell(hold=False)
        assert reply.result() == "d"
    assert "kv_transfer_params" not in decode.seen()[-1]["body"]
    assert len(prefill.seen()) == 1
    assert "hands over no KV" in router.log.read_text()


def test_a_decode_engine_killed_before_its_first_byte_is_replaced(fleet: Fleet, streaming: bool) -> None:
    prefill, decodes, router = two_decodes(fleet)
    for one in decodes:
        one.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(ask, router, streaming)
        eventually(lambda: any(one.states() == ["open"] for one in decodes))
        first, second = decodes if decodes[0].seen() else decodes[::-1]
        first.kill()
        eventually(lambda: second.states() == ["open"])
        second.tell(hold=False)
        assert reply.result() == second.name
    assert len({one["body"]["kv_transfer_params"]["transfer_id"] for one in prefill.seen()}) == 2


def test_a_decode_engine_killed_in_mid_stream_ends_the_stream_with_an_error_event(fleet: Fleet) -> None:
    prefill, decode, router = fleet.pair()
    decode.tell(die_at=2, cut=True)
    with router.stream() as reply:
        *events, error = texts(reply)
    assert [one["number"] for one in events] == [0, 1]
    assert error["error"]["code"] == "engine_failed"
    assert decode.http in error["error"]["message"]
    assert router.measure('requests_total{outcome="broken_off"}') == 1
    assert len(prefill.seen()) == 1


def test_a_decode_engine_killed_in_its_first_event_is_replaced(fleet: Fleet) -> None:
    """Nothing of it has gone to the client, which gets each token once."""
    _, decodes, router = two_decodes(fleet)
    decodes[0].tell(die_at=0, cut=True)
    assert [ask(router, True) for _ in range(3)] == ["d2"] * 3
    assert not decodes[0].alive


def test_the_only_decode_engine_killed_is_a_clear_error_and_its_successor_answers(
    fleet: Fleet, streaming: bool
) -> None:
    _, decode, router = fleet.pair(*QUICK)
    decode.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(ask, router, streaming)
        eventually(lambda: decode.states() == ["open"])
        decode.kill()
        assert reply.result() in ("no_engine", "engine_failed")
    assert router.post().json()["error"]["code"] == "no_engine"
    fleet.engine("d2", decode.port)
    eventually(lambda: router.engines() == (1, 1))
    assert ask(router, streaming) == "d2"


@pytest.mark.parametrize(("error_code", "cut"), [(500, False), (503, True)])
def test_a_stream_that_begins_with_an_engines_error_is_tried_elsewhere(
    fleet: Fleet, error_code: int, cut: bool
) -> None:
    _, decodes, router = two_decodes(fleet)
    decodes[0].tell(error_code=error_code, cut=cut)
    assert [ask(router, True) for _ in range(3)] == ["d2"] * 3


def test_a_stream_that_begins_with_the_clients_error_comes_through(fleet: Fleet) -> None:
    _, decode, router = fleet.pair()
    decode.tell(error_code=400)
    with router.stream() as reply:
        assert texts(reply) == [{"error": {"message": "as told", "code": 400}}, "[DONE]"]
    assert len(decode.seen()) == 1


def test_where_every_try_fails_the_last_failure_is_told(fleet: Fleet, streaming: bool) -> None:
    _, decode, router = fleet.pair()
    decode.tell(status=500)
    assert ask(router, streaming) == "engine_failed"
    assert len(decode.seen()) == 3
    reply = router.post()
    assert reply.status_code == 502
    assert "answered 500" in reply.json()["error"]["message"]


@pytest.mark.parametrize("hung", ["p", "d"])
def test_an_engine_that_is_frozen_is_given_up_when_it_was_silent_for_too_long(
    fleet: Fleet, hung: str, streaming: bool
) -> None:
    """SIGSTOP: its connections stay open and its port takes more, but nothing comes."""
    prefills, decodes = [fleet.engine("p1"), fleet.engine("p2")], [fleet.engine("d1"), fleet.engine("d2")]
    words = [word for one in prefills for word in ("--prefill", one.flag)]
    words += [word for one in decodes for word in ("--decode", one.flag)]
    router = fleet.router(*words, *QUICK)
    router.await_engines(2, 2)
    for one in (*prefills, *decodes):
        one.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(ask, router, streaming)
        asked = prefills if hung == "p" else decodes
        eventually(lambda: sum(len(one.seen()) for one in (*prefills, *decodes)) == 2)
        victim = next(one for one in asked if one.seen())
        victim.signal(signal.SIGSTOP)
        for one in (*prefills, *decodes):
            if one is not victim and (one in asked or hung == "d"):
                one.tell(hold=False)
        eventually(lambda: router.engines() == ((1, 2) if hung == "p" else (2, 1)))
        for one in decodes:
            if one is not victim:
                one.tell(hold=False)
        assert reply.result().startswith("d")
    victim.signal(signal.SIGCONT)
    router.await_engines(2, 2)


def test_a_request_ends_at_its_deadline_whatever_hangs(fleet: Fleet) -> None:
    prefill, decode, router = fleet.pair("--request-timeout", "1")
    for one in (prefill, decode):
        one.tell(hold=True)
    started = time.monotonic()
    reply = router.post()
    assert time.monotonic() - started >= 1
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "request_timeout")
    eventually(lambda: prefill.states() == decode.states() == ["aborted"])
    assert router.measure('requests_total{outcome="timed_out"}') == 1


def test_a_stream_ends_at_its_deadline_with_an_error_event(fleet: Fleet) -> None:
    _, decode, router = fleet.pair("--request-timeout", "1")
    decode.tell(hang_at=2, cut=True)
    with router.stream() as reply:
        *events, error = texts(reply)
    assert [one["number"] for one in events] == [0, 1]
    assert error["error"]["code"] == "request_timeout"


def test_a_client_that_does_not_read_is_not_waited_for_for_ever(fleet: Fleet) -> None:
    _, decode, router = fleet.pair("--request-timeout", "1")
    decode.tell(events=20_000)
    with router.stream(prompt="x" * 2000) as reply:
        next(reply.iter_raw())
        eventually(lambda: decode.states() == ["aborted"])
        eventually(lambda: router.measure("requests_going_on") == 0)


def test_a_body_that_does_not_come_is_not_waited_for_for_ever(fleet: Fleet) -> None:
    router = fleet.router("--heartbeat", ":0", "--request-timeout", "1")

    def slow() -> Any:
        yield b'{"prompt'
        eventually(lambda: router.measure('requests_total{outcome="refused"}') == 1)

    try:
        reply = httpx.post(router.url + PATH, content=slow(), **PLAIN)
    except httpx.TransportError:
        return  # it hung up while the rest was sent
    assert reply.json()["error"]["code"] == "slow_request"


def test_the_end_waits_for_what_goes_on(fleet: Fleet) -> None:
    _, decode, router = fleet.pair()
    decode.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(router.post)
        eventually(lambda: decode.states() == ["open"])
        router.signal(signal.SIGTERM)
        eventually(lambda: "stopping" in router.log.read_text())
        decode.tell(hold=False)
        assert reply.result().json()["engine"] == "d"
    eventually(lambda: not router.alive)


@pytest.mark.parametrize("signals", [1, 2])
def test_the_end_does_not_wait_for_ever(fleet: Fleet, signals: int, streaming: bool) -> None:
    """Until drain-s is over, or a second signal comes."""
    prefill, decode, router = fleet.pair("--drain-s", "1" if signals == 1 else "600")
    prefill.tell(hold=True)
    decode.tell(**({"hang_at": 1} if streaming else {"hold": True}))
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(_last_words, router, streaming)
        eventually(lambda: decode.states() == ["open"])
        for number in range(1, signals + 1):
            router.signal(signal.SIGTERM)
            eventually(lambda number=number: router.log.read_text().count("stopping") >= min(number, 1))  # type: ignore[misc]
        assert reply.result() == "router_stopping"
    eventually(lambda: not router.alive)
    eventually(lambda: prefill.states() == decode.states() == ["aborted"])


def _last_words(router: Router, streaming: bool) -> Any:
    if not streaming:
        return router.post().json()["error"]["code"]
    with router.stream() as reply:
        return texts(reply)[-1]["error"]["code"]
