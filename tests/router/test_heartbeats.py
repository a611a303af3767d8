"""Engines that come and go by heartbeat."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from kvferry.connectors.vllm.p2p.heartbeat import Heartbeat, Presence
from kvferry.router.heartbeat import read_secret
from router.fleet import Engine, Fleet, Router, eventually

QUICK = ("--engine-timeout", "2")


@pytest.fixture
def dealer() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 1000)
        yield sock


def test_engines_of_the_new_form_come_by_heartbeat_and_go_when_they_are_silent(fleet: Fleet) -> None:
    prefill, decode, router = fleet.engine("p"), fleet.engine("d"), fleet.router("--heartbeat", ":0", *QUICK)
    prefill.beat(router, "P", zmq_addresses=["h:5", "h:6"])
    decode.beat(router, "D")
    router.await_engines(1, 1)
    assert router.post().json()["engine"] == "d"
    assert decode.seen()[0]["body"]["kv_transfer_params"]["remote_addresses"] == ["h:5", "h:6"]
    decode.kill()
    router.await_engines(1, 0)
    assert router.post().status_code == 503
    assert router.measure('engines_joined_total{role="decode"}') == 1
    router.await_measure('engines_lost_total{role="decode"}', 1)


def test_engines_of_the_old_form_get_both_addresses_in_the_requests_id(fleet: Fleet) -> None:
    prefill, decode, router = fleet.engine("p"), fleet.engine("d"), fleet.router("--heartbeat", ":0")
    prefill.beat(router, "P", old=True)
    decode.beat(router, "D", old=True)
    router.await_engines(1, 1)
    router.post(kv_transfer_params={"x": 1}, headers={"X-Request-Id": "mine"})
    ids = {one.seen()[0]["headers"]["x-request-id"] for one in (prefill, decode)}
    (found,) = ids
    assert found.startswith(f"___prefill_addr_{prefill.kv}___decode_addr_{decode.kv}_")
    assert not any("kv_transfer_params" in one.seen()[0]["body"] for one in (prefill, decode))
    assert prefill.seen()[0]["body"]["max_tokens"] == 1


def test_the_data_parallel_rank_is_a_header(fleet: Fleet) -> None:
    """Two ranks behind one address are two engines, and each gets its share."""
    decode, router = fleet.engine("d"), fleet.router("--heartbeat", ":0")
    each = [
        {"type": "D", "http_address": decode.http, "zmq_address": f"h:{5 + rank}", "kvferry": 1, "dp_rank": rank}
        for rank in (0, 1)
    ]
    decode.tell(beat={"address": router.heartbeat, "maps": each})
    router.await_engines(0, 2)
    for _ in range(4):
        router.post()
    assert sorted(one["headers"]["x-data-parallel-rank"] for one in decode.seen()) == ["0", "0", "1", "1"]


def test_an_engine_that_is_leaving_is_asked_no_more_and_may_end_what_it_does(fleet: Fleet) -> None:
    decode, router = fleet.engine("d"), fleet.router("--heartbeat", ":0")
    decode.beat(router, "D")
    router.await_engines(0, 1)
    decode.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(router.post)
        eventually(lambda: decode.states() == ["open"])
        decode.beat(router, "D", leaving=True)
        router.await_engines(0, 0)
        decode.tell(hold=False)
        assert reply.result().json()["engine"] == "d"
    assert router.post().status_code == 503


def test_an_engine_is_asked_once_its_server_answers(fleet: Fleet) -> None:
    """Engines say that they are there before they listen, and an engine's server may die before what beats."""
    decode, router = fleet.engine("d"), fleet.router("--heartbeat", ":0", *QUICK)
    decode.tell(healthy=False)
    decode.beat(router, "D")
    router.await_measure('heartbeats_total{outcome="taken"}', 5, or_more=True)
    assert router.engines() == (0, 0)
    decode.tell(healthy=True)
    router.await_engines(0, 1)
    beats_for = fleet.engine("other")
    beats_for.tell(beat={"address": router.heartbeat, "maps": [_beat_of(decode)], "period_s": 0.1})
    decode.kill()
    assert router.post().status_code == 503
    before = router.measure('heartbeats_total{outcome="taken"}')
    router.await_measure('heartbeats_total{outcome="taken"}', before + 5, or_more=True)
    assert router.engines() == (0, 0)
    fleet.engine("d2", decode.port)
    router.await_engines(0, 1)
    assert router.post().json()["engine"] == "d2"


def test_an_engine_whose_server_hangs_is_given_up_while_it_says_that_it_is_there(fleet: Fleet) -> None:
    """SIGSTOP, and heartbeats by another: its connections stay open and its port takes more, but nothing comes."""
    first, second, router = fleet.engine("d1"), fleet.engine("d2"), fleet.router("--heartbeat", ":0", *QUICK)
    maps = [_beat_of(one) for one in (first, second)]
    fleet.engine("other").tell(beat={"address": router.heartbeat, "maps": maps})
    router.await_engines(0, 2)
    for one in (first, second):
        one.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(router.post)
        eventually(lambda: first.seen() or second.seen())
        victim, other = (first, second) if first.seen() else (second, first)
        victim.signal(signal.SIGSTOP)
        router.await_engines(0, 1)
        other.tell(hold=False)
        assert reply.result().json()["engine"] == other.name
    victim.signal(signal.SIGCONT)
    router.await_engines(0, 2)


def test_an_engine_at_the_routers_own_address_is_no_loop(fleet: Fleet) -> None:
    """Such as one that was told the router's port for its own; each try at it would be three more."""
    decode, router = fleet.engine("d"), fleet.router("--heartbeat", ":0")
    own = {**_beat_of(decode), "http_address": router.url.removeprefix("http://")}
    decode.tell(beat={"address": router.heartbeat, "maps": [own, _beat_of(decode)]})
    router.await_engines(0, 2)
    assert [router.post().json()["engine"] for _ in range(4)] == ["d"] * 4
    assert len(decode.seen()) == 4
    router.await_measure("requests_going_on", 0)
    router.await_measure('requests_total{outcome="answered"}', 4)
    assert "an engine has said its own address wrongly" in router.log.read_text()


def _beat_of(engine: Engine) -> dict[str, object]:
    return {"type": "D", "http_address": engine.http, "zmq_address": engine.kv, "kvferry": 1}


def test_a_router_that_was_killed_knows_its_engines_again_a_moment_after_its_start(fleet: Fleet) -> None:
    prefill, decode, router = fleet.engine("p"), fleet.engine("d"), fleet.router("--heartbeat", ":0")
    prefill.beat(router, "P")
    decode.beat(router, "D")
    router.await_engines(1, 1)
    decode.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        broken = pool.submit(router.post)
        eventually(lambda: decode.states() == ["open"])
        router.kill()
        assert broken.exception() is not None
    eventually(lambda: decode.states() == ["aborted"])
    decode.tell(hold=False)
    again = fleet.router("--heartbeat", router.heartbeat)
    again.await_engines(1, 1)
    assert again.post().json()["engine"] == "d"


def test_garbage_changes_nothing(fleet: Fleet, dealer: zmq.Socket[bytes]) -> None:
    decode, router = fleet.engine("d"), fleet.router("--heartbeat", ":0", *QUICK)
    decode.beat(router, "D")
    router.await_engines(0, 1)
    dealer.connect(f"tcp://{router.heartbeat}")
    good = {"type": "D", "http_address": "h:1", "zmq_address": "h:2"}
    garbage = [
        [b""],
        [b"\xc1"],
        [b"\x91" * 10_000],
        [b"x" * 30_000],
        [msgspec.json.encode(good)],
        [msgspec.msgpack.encode({**good, "type": "X"})],
        [b"", b"", msgspec.msgpack.encode(good)],
        [b"x", msgspec.msgpack.encode(good)],
    ]
    for frames in garbage:
        dealer.send_multipart(frames)
    router.await_measure('heartbeats_total{outcome="garbage"}', len(garbage))
    assert router.engines() == (0, 1)
    assert router.post().json()["engine"] == "d"


def test_what_is_no_zeromq_at_all_changes_nothing(fleet: Fleet) -> None:
    decode, router = fleet.engine("d"), fleet.router("--heartbeat", ":0")
    host, port = router.heartbeat.split(":")
    socks = [socket.create_connection((host, int(port))) for _ in range(20)]
    for number, sock in enumerate(socks):
        sock.sendall(bytes([number * 12]) * 5000)
    decode.beat(router, "D")
    router.await_engines(0, 1)
    for sock in socks:
        sock.close()
    assert router.post().json()["engine"] == "d"


def test_no_more_engines_than_it_may_have(fleet: Fleet, dealer: zmq.Socket[bytes]) -> None:
    decode, router = fleet.engine("d"), fleet.router("--heartbeat", ":0", "--max-engines", "3")
    decode.beat(router, "D")
    router.await_engines(0, 1)
    dealer.connect(f"tcp://{router.heartbeat}")
    for port in range(1, 50):
        dealer.send(msgspec.msgpack.encode({"type": "P", "http_address": f"h:{port}", "zmq_address": "h:1"}))
    router.await_measure('heartbeats_total{outcome="no_room"}', 47)
    assert router.engines() == (0, 1)  # nobody answers at the others' addresses


def test_a_flood_of_garbage_does_not_keep_requests_away(fleet: Fleet, dealer: zmq.Socket[bytes]) -> None:
    decode, router = fleet.engine("d"), fleet.router("--heartbeat", ":0")
    decode.beat(router, "D")
    router.await_engines(0, 1)
    dealer.connect(f"tcp://{router.heartbeat}")
    for _ in range(20_000):
        dealer.send(b"\xc1" * 50)
    assert router.post().json()["engine"] == "d"
    assert router.engines() == (0, 1)


def test_heartbeats_that_others_can_reach_need_a_word(fleet: Fleet) -> None:
    with pytest.raises(ConnectionError, match="insecure"):
        fleet.router("--heartbeat", "0.0.0.0:0")
    router: Router = fleet.router("--heartbeat", "0.0.0.0:0", "--insecure")
    assert router.heartbeat.startswith("0.0.0.0:")


def test_with_a_secret_only_engines_that_have_it_are_heard(fleet: Fleet, tmp_path: Path) -> None:
    """No other word is needed then."""
    file = tmp_path / "token"
    file.write_text("a secret that all share\n")
    decode, router = fleet.engine("d"), fleet.router("--heartbeat", "0.0.0.0:0", "--token-file", str(file))
    port = router.heartbeat.rpartition(":")[2]
    decode.tell(beat={"address": f"127.0.0.1:{port}", "maps": [_beat_of(decode)]})
    router.await_measure('heartbeats_total{outcome="untrusted"}', 3, or_more=True)
    assert router.engines() == (0, 0)
    assert router.log.read_text().count("a heartbeat is refused: it is not signed") == 1
    secret = read_secret(str(file))
    beats = Heartbeat(f"127.0.0.1:{port}", Presence(["D"], decode.http, [decode.kv]), secret=secret, every_s=0.1)
    try:
        router.await_engines(0, 1)
        assert router.post().json()["engine"] == "d"
    finally:
        beats.close()
    router.await_engines(0, 0)  # it has said so
