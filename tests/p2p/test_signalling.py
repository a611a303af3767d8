"""Who gets in, and what becomes of those who should not: handshakes, garbage, floods, addresses."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
import zmq

from kvferry.errors import ShareError, TransferError, WireError
from kvferry.p2p import P2pConfig, P2pNcclEngine
from kvferry.p2p.signal.frames import MAX_MESSAGE_BYTES, decode_message, encode_message
from kvferry.p2p.signal.messages import (
    NOBODY,
    About,
    Ask,
    Beat,
    Challenge,
    Goodbye,
    Hello,
    Introduce,
    Message,
    Offer,
    Stopped,
    TensorMeta,
    Welcome,
)
from p2p.conftest import Make
from p2p.sides import Sides, address_of
from serving.process import eventually

ME = os.urandom(16)
SENT = torch.arange(1000)
FLOOD = int(os.environ.get("KVFERRY_FLOOD", "30000"))  # scripts/flood-full: 100,000
GREETINGS = FLOOD if "KVFERRY_FLOOD" in os.environ else 2000
FLOOD_S = 120 + FLOOD // 50


class Stranger:
    """Somebody who speaks the protocol by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, queue_all: bool = False) -> None:
        self.socket = context.socket(zmq.DEALER)
        if queue_all:  # however late this process gets round to it, it does not count as one that does not read
            self.socket.setsockopt(zmq.SNDHWM, 0)
            self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(f"tcp://{address}")
        self.peer = NOBODY

    def say(self, message: Message, **fields: Any) -> None:
        stamped = {"sender": ME, "receiver": self.peer, **fields}
        self.socket.send(encode_message(msgspec.structs.replace(message, **stamped)))

    def hear(self, timeout_s: float = 10) -> Any:
        assert self.socket.poll(int(timeout_s * 1e3)), "nothing was heard"
        return decode_message(self.socket.recv())

    def greet(self, **about: Any) -> Any:
        """Up to the answer to the introduction."""
        self.say(Hello(oldest=1, version=1, nonce=os.urandom(32)))
        challenge = self.hear()
        assert isinstance(challenge, Challenge)
        self.peer = challenge.sender
        given = {
            "address": "me",
            "host_id": "h",
            "device_uuid": "",
            "tp_rank": 0,
            "tp_size": 1,
            "carriers": ("host",),
            "geometry": None,
            **about,
        }
        self.say(Introduce(mac=b"", about=About(**given)))
        return self.hear()

    def connect(self) -> socket.socket:
        """The whole of it; the link."""
        welcome = self.greet()
        assert isinstance(welcome, Welcome)
        link = socket.create_connection(("127.0.0.1", welcome.link_port))
        link.sendall(welcome.ticket)
        assert link.recv(1) == b"\1"
        return link


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@contextmanager
def stranger(context: zmq.Context[zmq.Socket[bytes]], engine: P2pNcclEngine) -> Iterator[Stranger]:
    made = Stranger(context, engine.address)
    yield made
    made.socket.close(linger=0)


def works(p: P2pNcclEngine, d: P2pNcclEngine) -> None:
    p.send_tensor("works", SENT, d.address).wait(40)
    assert torch.equal(d.recv_tensor("works", timeout_s=20), SENT)


def test_tokens(make: Make) -> None:
    secret = "a token of sixteen bytes"
    p, d = make(token=secret), make(token=secret)
    works(p, d)
    for other in (make(), make(token="another secret of some")):
        for one, two in ((other, d), (p, other)):
            with pytest.raises(TransferError, match="token") as caught:
                one.send_tensor("a", SENT, two.address).wait(20)
            assert caught.value.code == "refused"


def test_curve_keys(make: Make, context: Any) -> None:
    """Signalling is encrypted, and nobody without the key gets as far as a greeting."""
    key = zmq.curve_keypair()[1].decode()
    p, d = make(curve_secret_key=key), make(curve_secret_key=key)
    works(p, d)
    works(
        make(curve_secret_key=key, token="a token of sixteen bytes"),
        make(curve_secret_key=key, token="a token of sixteen bytes"),
    )
    plain = make(connect_timeout_s=1.0)
    other = make(connect_timeout_s=1.0, curve_secret_key=zmq.curve_keypair()[1].decode())
    for stranger_engine in (plain, other):
        for one, two in ((stranger_engine, d), (make(connect_timeout_s=1.0, curve_secret_key=key), stranger_engine)):
            with pytest.raises(TransferError) as caught:
                one.send_tensor("a", SENT, two.address).wait(20)
            assert caught.value.code == "unreachable"
    knows_public = context.socket(zmq.DEALER)  # the server's public key alone lets nobody in
    knows_public.curve_publickey, knows_public.curve_secretkey = zmq.curve_keypair()
    knows_public.curve_serverkey = zmq.curve_public(key.encode())
    knows_public.connect(f"tcp://{d.address}")
    knows_public.send(encode_message(Hello(sender=ME, oldest=1, version=1, nonce=os.urandom(32))))
    assert not knows_public.poll(1000)
    works(p, d)


def test_a_proof_cannot_be_used_again(make: Make, context: Any) -> None:
    """Whoever has heard a handshake cannot repeat it: the acceptor's nonce is another one."""
    engine = make(token="a token of sixteen bytes")
    with stranger(context, engine) as one:
        answer = one.greet()
    assert isinstance(answer, Goodbye)
    assert answer.code == "refused"


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "some.name:0"])
def test_strangers_are_not_let_in_by_mistake(address: str) -> None:
    with pytest.raises(ValueError, match="other machines"):
        P2pConfig(address=address)
    P2pConfig(address=address, insecure=True)
    P2pConfig(address=address, token="a token of sixteen bytes")
    P2pConfig(address=address, curve_secret_key="k" * 40)


@pytest.mark.parametrize(
    "wrong",
    [
        {"address": "nonsense"},
        {"address": "::1:5555"},
        {"send_type": "PUSH"},
        {"carrier": "pigeon"},
        {"lease_s": 0.0},
        {"heartbeat_s": float("nan")},
        {"kv_buffer_size": -1},
        {"tp_rank": 2, "tp_size": 2},
        {"token": "short"},
        {"curve_secret_key": "short"},
    ],
)
def test_configurations_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        P2pConfig(**wrong)


def test_another_version(make: Make, context: Any) -> None:
    engine = make()
    with stranger(context, engine) as one:
        one.say(Hello(oldest=7, version=9, nonce=os.urandom(32)))
        answer = one.hear()
    assert (answer.code, answer.text.endswith("protocol 7 to 9 there, 1 to 1 here")) == ("version", True)


def test_no_carrier_in_common(make: Make, context: Any) -> None:
    with stranger(context, make()) as one:
        answer = one.greet(carriers=("ipc", "pigeon"))
    assert answer.code == "no_carrier"
    assert "ipc, pigeon there" in answer.text


def test_before_the_session_is_up_nothing_counts(make: Make, context: Any) -> None:
    """No KV and no GET for somebody who has not greeted."""
    engine = make()
    engine.send_tensor("secret", SENT)
    with stranger(context, engine) as one:
        one.say(Ask(transfer_id="secret", part=0, wait_s=5))
        assert one.hear().code == "peer_gone"
    with stranger(context, engine) as one:
        one.say(Hello(oldest=1, version=1, nonce=os.urandom(32)))
        one.peer = one.hear().sender
        one.say(Ask(transfer_id="secret", part=0, wait_s=5))
        assert one.hear().code == "protocol"
    with stranger(context, engine) as one:
        assert isinstance(one.greet(), Welcome)
        one.say(Ask(transfer_id="secret", part=0, wait_s=5))  # without its link
        assert one.hear().code == "protocol"


def test_a_beat_that_is_faster_than_the_link(make: Make, context: Any) -> None:
    """The side that sees the link come up first begins to beat; nothing else may come as early."""
    engine = make()
    with stranger(context, engine) as one:
        welcome = one.greet()
        one.say(Beat())
        with socket.create_connection(("127.0.0.1", welcome.link_port)) as link:
            link.sendall(welcome.ticket)
            assert link.recv(1) == b"\1"
            assert list(engine.stats()["peers"]) == ["me"]
    with stranger(context, engine) as one:
        one.say(Hello(oldest=1, version=1, nonce=os.urandom(32)))
        one.peer = one.hear().sender
        one.say(Beat())
        assert one.hear().code == "protocol"


@pytest.mark.parametrize(
    "data", [b"", b"garbage", b"\x81\xa4type\xa5hello", b"\xc1" * 1000, b"\xdd\xff\xff\xff\xff", b"\x00" * 300_000]
)
def test_garbage(make: Make, context: Any, data: bytes) -> None:
    """It ends the one session that it came over, if any."""
    p, d = make(), make()
    works(p, d)
    with stranger(context, d) as one:
        one.socket.send(data)
        link = one.connect() if len(data) <= MAX_MESSAGE_BYTES else None
        if link is not None:
            one.socket.send(data)
            assert one.hear().code == "malformed"
            link.close()
    with stranger(context, d) as one:
        one.socket.send_multipart([b"many", b"parts", data[:100]])
    with socket.create_connection(tuple(d.address.split(":")), timeout=10) as raw:  # type: ignore[arg-type]
        raw.sendall(data or b"x")
    works(p, d)


def test_messages_are_bounded() -> None:
    offer = Offer(number=1, transfer_id="x", part=0, item_bytes=(1,), lease_s=1.0, sender=ME)
    assert decode_message(encode_message(offer)) == offer
    with pytest.raises(ValueError, match="at most"):
        encode_message(msgspec.structs.replace(offer, transfer_id="x" * MAX_MESSAGE_BYTES))
    for change in (
        {"transfer_id": ""},
        {"transfer_id": "x" * 2000},
        {"number": 0},
        {"item_bytes": ()},
        {"item_bytes": (-1,)},
        {"item_bytes": (1 << 60,)},
        {"lease_s": float("nan")},
        {"sender": b"short"},
        {"tensor": TensorMeta("uint8", (1,) * 40)},
    ):
        with pytest.raises(WireError):
            decode_message(msgspec.msgpack.encode(msgspec.structs.replace(offer, **change)))


def test_late_messages_are_dropped_and_counted(make: Make, context: Any) -> None:
    """N7: of, or for, an engine that had the address before."""
    engine = make()
    with stranger(context, engine) as one:
        link = one.connect()
        one.say(Beat(), receiver=os.urandom(16))
        one.say(Beat(), sender=os.urandom(16))
        offer = Offer(number=1, transfer_id="a", part=0, item_bytes=(8,), lease_s=5, tensor=TensorMeta("int64", (1,)))
        one.say(offer, receiver=os.urandom(16))
        eventually(lambda: engine.stats().get("late") == 3)
        assert engine.stats()["receiving"] == 0
        link.close()


@pytest.mark.parametrize(
    "lie",
    [
        {"item_bytes": (8, 8)},
        {"item_bytes": (9,)},
        {"tensor": TensorMeta("int65", (1,))},
        {"tensor": TensorMeta("int64", (1 << 39, 1 << 39))},
        {"tensor": None},
        {"tensor": None, "num_blocks": 3},
    ],
)
def test_offers_that_lie(make: Make, context: Any, lie: dict[str, Any]) -> None:
    """They are refused, and the session goes on."""
    engine = make(True)
    good = Offer(number=1, transfer_id="a", part=0, item_bytes=(8,), lease_s=5, tensor=TensorMeta("int64", (1,)))
    with stranger(context, engine) as one:
        link = one.connect()
        one.say(msgspec.structs.replace(good, number=2, **lie))
        answer = one.hear()
        assert (type(answer).__name__, answer.number, answer.code) == ("Stopped", 2, "mismatch")
        one.say(good)
        assert type(one.hear()).__name__ == "Accept"
        link.close()


@pytest.mark.timeout(FLOOD_S)
def test_a_flood_of_greetings(sides: Sides, context: Any) -> None:
    """N11: of engines that nobody has heard of. They are forgotten again, and real engines get through."""
    side, other = sides.start(connect_timeout_s=1.0, heartbeat_s=20), sides.start()
    place = f"tcp://{address_of(side)}"
    before = side.call("usage")["rss"]
    answered = 0
    with context.socket(zmq.DEALER) as one:
        one.setsockopt(zmq.LINGER, 0)
        for _ in range(GREETINGS):
            one.setsockopt(zmq.ROUTING_ID, b"\1" + os.urandom(16))
            one.connect(place)
            one.send(encode_message(Hello(sender=os.urandom(16), oldest=1, version=1, nonce=os.urandom(32))))
            answered += one.poll(20_000) > 0 and one.recv() != b""
            one.disconnect(place)
    assert answered == GREETINGS
    assert side.call("usage")["rss"] - before < 50 << 20
    other.call("send_tensor", name="real", nbytes=1000, seed=1, to=address_of(side))
    assert side.call("recv_tensor", name="real", seed=1)["equal"]


@pytest.mark.timeout(FLOOD_S)
def test_a_flood_of_ids(sides: Sides, context: Any) -> None:
    """N11: offers under random ids take no memory to speak of, and then a real transfer works."""
    side = sides.start(kv_buffer_size=1 << 20, heartbeat_s=20)
    other = sides.start()
    one = Stranger(context, address_of(side), queue_all=True)
    link = one.connect()
    before = side.call("usage")["rss"]
    meta = TensorMeta("uint8", (1 << 14,))
    refused = 0
    for number in range(1, FLOOD + 1):
        offer = Offer(
            number=number, transfer_id=os.urandom(16).hex(), part=0, item_bytes=(1 << 14,), lease_s=60, tensor=meta
        )
        one.say(offer)
        refused += drain(one)
    while refused < FLOOD - 5000:
        assert one.socket.poll(20_000), "nothing was heard"
        refused += drain(one)
    assert side.call("stats")["stats"]["refused"]["too_many"] >= refused
    assert side.call("usage")["rss"] - before < 25 << 20  # were all of them kept, it would be more than twice that
    link.close()
    one.socket.close(linger=0)
    eventually(lambda: side.call("stats")["stats"]["unclaimed"] == 0)
    other.call("send_tensor", name="real", nbytes=1000, seed=1, to=address_of(side))
    assert side.call("recv_tensor", name="real", seed=1)["equal"]


def drain(one: Stranger) -> int:
    """Read what has come: how many refusals."""
    count = 0
    while one.socket.poll(0):
        message = decode_message(one.socket.recv())
        count += isinstance(message, Stopped) and message.code == "too_many"
    return count


def test_an_address_in_use(make: Make) -> None:
    engine = make()
    with pytest.raises(ShareError, match="port, or 0 for any that is free"):
        P2pNcclEngine(P2pConfig(address=engine.address))


def test_ipv6_and_names(make: Make) -> None:
    """U5: brackets, and a name."""
    p, d = make(address="[::1]:0"), make(address="[::1]:0")
    assert d.address.startswith("[::1]:")
    works(p, d)
    named = make(address="localhost:0")
    assert named.address.startswith("localhost:")
    works(make(), named)


def test_engines_that_start_at_once(make: Make) -> None:
    """U5: 50 times two engines of one configuration."""
    with ThreadPoolExecutor(2) as pool:
        for _ in range(50):
            made = list(pool.map(P2pNcclEngine, [P2pConfig(kv_buffer_size=1 << 16)] * 2))
            assert len({engine.address for engine in made}) == 2
            for engine in made:
                engine.close()


def test_links_without_a_ticket(make: Make) -> None:
    """They are closed, and hold nothing up."""
    p, d = make(), make()
    strangers = [socket.create_connection(("127.0.0.1", d._parts.links.port)) for _ in range(100)]
    strangers[50].sendall(os.urandom(32))
    strangers[50].settimeout(10)
    assert strangers[50].recv(1) == b""
    works(p, d)
    for one in strangers:
        one.close()


def test_closing_leaves_nothing(make: Make) -> None:
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    p, d = P2pNcclEngine(P2pConfig(kv_buffer_size=1 << 20)), P2pNcclEngine(P2pConfig(kv_buffer_size=1 << 20))
    works(p, d)
    d.close()
    p.close()
    p.close()
    assert threading.active_count() == before[1]
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= len(before[0]))
