"""Heartbeats: the old form and the new one, and all that is none."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connectors.vllm.p2p.heartbeat import Presence
from kvferry.errors import WireError
from kvferry.router.addresses import EngineAddress, EngineKey, Role
from kvferry.router.heartbeat import MAX_AGE_S, MAX_HEARTBEAT_BYTES, UntrustedError, decode_heartbeat, read_secret
from router.router_pieces import beat

OLD: dict[str, Any] = {"type": "P", "http_address": "10.0.0.1:8100", "zmq_address": "10.0.0.1:14579"}


def test_the_old_form_is_a_legacy_engine() -> None:
    found = decode_heartbeat(msgspec.msgpack.encode(OLD))
    key = EngineKey(Role.PREFILL, "10.0.0.1:8100")
    assert found == (EngineAddress(key, ("10.0.0.1:14579",), legacy=True), False)


def test_the_new_form_has_all_ranks_and_more() -> None:
    data = beat("D", "h:1", "h:5", kvferry=1, zmq_addresses=["h:5", "h:6"], dp_rank=3, leaving=True)
    found = decode_heartbeat(data)
    assert found == (EngineAddress(EngineKey(Role.DECODE, "h:1", 3), ("h:5", "h:6")), True)


def test_a_new_engine_of_one_rank_need_not_list_it() -> None:
    assert decode_heartbeat(beat("D", "h:1", "h:5", kvferry=2)).address == EngineAddress(
        EngineKey(Role.DECODE, "h:1"), ("h:5",)
    )


def test_keys_that_are_not_known_are_no_matter() -> None:
    assert decode_heartbeat(beat("P", "h:1", "h:2", later={"a": [1]})).address.legacy


@pytest.mark.parametrize(
    "change",
    [
        {"type": "X"},
        {"type": None},
        {"http_address": "h"},
        {"http_address": "h:0"},
        {"http_address": "h:1/../admin?x"},
        {"http_address": "user@h:1"},
        {"http_address": "h:1\r\nX: y"},
        {"http_address": "x" * 400 + ":1"},
        {"http_address": 5},
        {"zmq_address": ""},
        {"zmq_addresses": []},
        {"zmq_addresses": ["h:1"] * 65},
        {"zmq_addresses": [None]},
        {"dp_rank": -1},
        {"dp_rank": 1 << 16},
        {"dp_rank": "0"},
        {"kvferry": 0},
        {"leaving": 1},
    ],
)
def test_a_map_that_is_wrong_somewhere_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        decode_heartbeat(msgspec.msgpack.encode({**OLD, **change}))


@pytest.mark.parametrize("missing", OLD)
def test_a_map_without_one_of_the_old_keys_is_none(missing: str) -> None:
    with pytest.raises(WireError):
        decode_heartbeat(msgspec.msgpack.encode({name: value for name, value in OLD.items() if name != missing}))


def test_what_is_too_long_is_not_even_read() -> None:
    with pytest.raises(WireError, match="at most"):
        decode_heartbeat(beat("P", "h:1", "h:2", more="x" * MAX_HEARTBEAT_BYTES))


SECRET = b"a secret that all share"
KV = tuple(f"h:{port}" for port in range(1, 65))


def signed(secret: bytes | None = SECRET, *, leaving: bool = False) -> bytes:
    """As our connector sends it."""
    (data,) = Presence(["P"], "h:1", KV, 3).messages(secret, leaving=leaving)
    return data


@pytest.mark.parametrize("leaving", [False, True])
def test_a_signed_one_is_taken_with_and_without_the_secret(leaving: bool) -> None:
    wanted = (EngineAddress(EngineKey(Role.PREFILL, "h:1", 3), KV), leaving)
    assert decode_heartbeat(signed(leaving=leaving), SECRET, time.time()) == wanted
    assert decode_heartbeat(signed(leaving=leaving)) == wanted


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (signed(None), "not signed"),
        (msgspec.msgpack.encode(OLD), "not signed"),
        (msgspec.msgpack.encode({**OLD, "signed": "x", "mac": 5}), "not signed"),
        (b"\xc1", "not signed"),
        (signed(SECRET + b"."), "another secret"),
    ],
)
def test_with_a_secret_none_is_taken_but_signed_ones(data: bytes, text: str) -> None:
    with pytest.raises(UntrustedError, match=text):
        decode_heartbeat(data, SECRET, time.time())


@pytest.mark.parametrize("off_s", [-MAX_AGE_S - 5, MAX_AGE_S + 5])
def test_a_signed_one_is_of_no_use_for_long(off_s: float) -> None:
    with pytest.raises(UntrustedError, match="sent it"):
        decode_heartbeat(signed(), SECRET, time.time() + off_s)


def test_what_is_said_beside_what_was_signed_is_no_matter() -> None:
    told = msgspec.msgpack.decode(signed())
    forged = msgspec.msgpack.encode(told | {"http_address": "evil:1", "zmq_addresses": ["evil:2"], "leaving": True})
    assert decode_heartbeat(forged, SECRET, time.time()) == decode_heartbeat(signed(), SECRET, time.time())


@given(st.integers(0, 500), st.integers(1, 255))
def test_a_signed_one_that_was_changed_is_refused(place: int, change: int) -> None:
    told = msgspec.msgpack.decode(signed())
    for part in ("signed", "mac"):
        data = bytearray(told[part])
        data[place % len(data)] ^= change
        with pytest.raises(UntrustedError):
            decode_heartbeat(msgspec.msgpack.encode(told | {part: bytes(data)}), SECRET, time.time())


def test_the_secret_is_that_of_the_engines_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(SECRET + b"\n")
    assert read_secret(str(file)) == SECRET
    for content in (b"short", b"\xff" * 40):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="token_file"):
            read_secret(str(file))


@given(st.binary(max_size=200) | st.integers(1, 40_000).map(lambda depth: b"\x91" * depth))
def test_garbage_is_garbage(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_heartbeat(data)


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_heartbeat_is_one_or_garbage(place: int, byte: int) -> None:
    data = bytearray(beat("D", "h:1", "h:5", kvferry=1, zmq_addresses=["h:5", "h:6"], dp_rank=3))
    data[place % len(data)] = byte
    with contextlib.suppress(WireError):
        decode_heartbeat(bytes(data))
