"""Heartbeats: the old form and the new one, and all that is none."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import WireError
from kvferry.router.addresses import EngineAddress, EngineKey, Role
from kvferry.router.heartbeat import MAX_HEARTBEAT_BYTES, decode_heartbeat
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
