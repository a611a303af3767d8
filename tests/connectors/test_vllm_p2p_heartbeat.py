"""What a router hears: the removed connector's message, and the keys that came to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.connectors.vllm.p2p.heartbeat import Heartbeat, Presence

OLD_KEYS = {"type", "http_address", "zmq_address"}


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.bind_to_random_port("tcp://127.0.0.1")
        yield sock


def heard(router: zmq.Socket[bytes]) -> dict[str, Any]:
    assert router.poll(20_000)
    _, message = router.recv_multipart()
    found: dict[str, Any] = msgspec.msgpack.decode(message)
    return found


def address(router: zmq.Socket[bytes]) -> str:
    return router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")


def test_an_engine_is_heard_of_again_and_again_until_it_leaves(router: zmq.Socket[bytes]) -> None:
    presence = Presence(["D"], "127.0.0.1:8100", ["127.0.0.1:7000", "127.0.0.1:7001"], 1)
    beat = Heartbeat(address(router), presence, every_s=0.05)
    wanted = {
        "type": "D",
        "http_address": "127.0.0.1:8100",
        "zmq_address": "127.0.0.1:7000",
        "zmq_addresses": ["127.0.0.1:7000", "127.0.0.1:7001"],
        "kvferry": 1,
        "dp_rank": 1,
    }
    assert [heard(router) for _ in range(3)] == [wanted] * 3
    beat.close()
    beat.close()
    last = heard(router)
    while "leaving" not in last:
        last = heard(router)
    assert last == wanted | {"leaving": True}


def test_an_engine_of_both_roles_says_both(router: zmq.Socket[bytes]) -> None:
    beat = Heartbeat(address(router), Presence(["P", "D"], "h:1", ["h:2"]))
    found = [heard(router) for _ in range(2)]
    beat.close()
    assert [one["type"] for one in found] == ["P", "D"]
    assert set(found[0]) == OLD_KEYS | {"kvferry", "zmq_addresses"}


@pytest.mark.parametrize("proxy", ["127.0.0.1:9", "no.such.host.invalid:1", "[::1]:9"])
def test_a_router_that_is_not_there_holds_up_nothing(proxy: str) -> None:
    Heartbeat(proxy, Presence(["P"], "h:1", ["h:2"]), every_s=0.01).close()


def test_a_router_that_comes_late_hears_of_now_and_soon() -> None:
    """Signed ones are of no use when they are old."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        router.unbind(f"tcp://127.0.0.1:{port}")
        beat = Heartbeat(f"127.0.0.1:{port}", Presence(["P"], "h:1", ["h:2"]), secret=b"s" * 16, every_s=600)
        time.sleep(0.5)
        came_at = time.time()
        router.bind(f"tcp://127.0.0.1:{port}")
        told = msgspec.msgpack.decode(heard(router)["signed"])
        beat.close()
    assert told["sent_at"] >= came_at
