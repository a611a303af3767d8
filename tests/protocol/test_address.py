"""Addresses: hosts, ports, brackets; what is none is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.client.url import parse_url
from kvferry.config import ServerConfig
from kvferry.protocol.address import TcpAddress, UnixAddress


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("tcp://127.0.0.1:5555", "127.0.0.1", 5555),
        ("tcp://[::1]:5555", "::1", 5555),
        ("tcp://[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("tcp://node-7.cluster:65535", "node-7.cluster", 65535),
        ("tcp://:5555", "127.0.0.1", 5555),
        ("tcp://0.0.0.0:0", "0.0.0.0", 0),
    ],
)
def test_a_host_and_a_port(url: str, host: str, port: int) -> None:
    assert TcpAddress.parse(url) == TcpAddress(host, port)
    assert TcpAddress.parse(str(TcpAddress(host, port))) == TcpAddress(host, port)


@pytest.mark.parametrize(
    "url",
    [
        "tcp://host",
        "tcp://host:",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:٣",
        "tcp://::1:5555",
        "tcp://[::1]5555",
        "tcp://[::1:5555",
        "tcp://[host]:5555",
        "tcp://[]:5555",
        "tcp://[1.2.3.4]:80",
        "tcp://m\u00fcnchen:80",
        "tcp://ho\0st:80",
        "tcp://user@host:5555",
        "tcp://host:5555/path",
        "tcp://ho st:5555",
        "udp://host:5555",
        "host:5555",
        "",
    ],
)
def test_what_is_no_tcp_address_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="use tcp://host:port"):
        TcpAddress.parse(url)


@given(st.text(max_size=30) | st.from_regex(r"\[?[a-f0-9:.%]{0,8}\]?:[0-9]{1,5}", fullmatch=True))
def test_the_configuration_takes_what_the_listener_takes(text: str) -> None:
    def takes(parse: Callable[[str], object]) -> bool:
        try:
            parse(f"tcp://{text}")
        except ValueError:
            return False
        return True

    assert takes(TcpAddress.parse) == takes(lambda url: ServerConfig(socket_path="s", token_file="t", listen=url))


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_named_error(text: str) -> None:
    try:
        address = TcpAddress.parse("tcp://" + text)
    except ValueError:
        return
    assert TcpAddress.parse(str(address)) == address


def test_what_clients_call_a_server() -> None:
    assert parse_url("tcp://[::1]:5555") == TcpAddress("::1", 5555)
    assert parse_url("unix:///tmp/s") == UnixAddress("/tmp/s")
    assert str(parse_url("/tmp/s")) == "unix:///tmp/s"
    with pytest.raises(ValueError, match="port 0"):
        parse_url("tcp://host:0")
