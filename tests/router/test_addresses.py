"""Addresses of engines as people write them."""

from __future__ import annotations

import pytest

from kvferry.router.addresses import EngineAddress, EngineKey, Role, clean_address, parse_engine


@pytest.mark.parametrize(
    ("text", "http", "kv"),
    [
        ("http://h:8100=h:14579", "h:8100", ("h:14579",)),
        ("http://h:8100/=h:14579,h:14580", "h:8100", ("h:14579", "h:14580")),
        ("http://[::1]:8100=[::1]:1", "[::1]:8100", ("[::1]:1",)),
        ("http://10.0.0.1:80=10.0.0.1:5", "10.0.0.1:80", ("10.0.0.1:5",)),
        ("http://:80=:5", "127.0.0.1:80", ("127.0.0.1:5",)),
    ],
)
def test_an_engine_is_its_server_and_its_ranks(text: str, http: str, kv: tuple[str, ...]) -> None:
    for role in Role:
        assert parse_engine(role, text) == EngineAddress(EngineKey(role, http), kv)


def test_a_decode_engine_needs_no_address_for_kv_and_a_prefill_engine_does() -> None:
    assert parse_engine(Role.DECODE, "http://h:1").kv == ()
    with pytest.raises(ValueError, match="add =HOST:PORT"):
        parse_engine(Role.PREFILL, "http://h:1")


@pytest.mark.parametrize(
    "text",
    [
        "h:8100=h:1",
        "https://h:8100=h:1",
        "http://h=h:1",
        "http://h:0=h:1",
        "http://h:1=",
        "http://h:1=h:1,",
        "http://h:1=h:1,h:1",
        "http://h:1=" + ",".join(f"h:{port}" for port in range(1, 66)),
        "http://me:secret@h:1=h:1",
        "http://h:1/path=h:1",
    ],
)
def test_what_is_no_engine_is_refused(text: str) -> None:
    for role in Role:
        with pytest.raises(ValueError):
            parse_engine(role, text)


@pytest.mark.parametrize(
    "text", ["a b:1", "a/b:1", "[fe80::1%eth0]:1", "h:65536", "h:0", "\u00e9:1", "h\n:1", "a:b:1", "*:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        clean_address(text)


def test_an_engine_says_which_it_is() -> None:
    assert str(EngineKey(Role.DECODE, "h:1", 3)) == "decode engine h:1 rank 3"
