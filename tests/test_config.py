"""The server's configuration as it is made in a program."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.config import ServerConfig, server_settings, sessions_of_a_tenant
from kvferry.settings import split_host_port


def test_defaults_are_what_the_checks_let_pass() -> None:
    config = ServerConfig(socket_path="s")
    assert config.memory_bytes == 4 << 30
    assert config.disk_path is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"socket_path": ""}, "socket_path is ''"),
        ({"socket_path": "/" + "x" * 107}, "1 to 107 bytes"),
        ({"socket_path": "a\0b"}, "socket_path"),
        ({"socket_path": None}, "socket_path is None"),
        ({"memory_bytes": 65535}, "memory_bytes is 65535; it must be a size of at least 64KiB"),
        ({"memory_bytes": "4GiB"}, "memory_bytes is '4GiB'"),
        ({"memory_bytes": 1e9}, "memory_bytes"),
        ({"device": "tpu"}, "one of auto, cpu, cuda"),
        ({"allow_uids": frozenset({-1})}, "whole numbers from 0"),
        ({"allow_uids": 5}, "allow_uids is 5"),
        ({"lease_ttl_s": 0}, "lease_ttl_s"),
        ({"lease_ttl_s": float("nan")}, "lease_ttl_s is nan"),
        ({"max_sessions": 0}, "max_sessions is 0"),
        ({"max_sessions": True}, "max_sessions is True"),
        ({"tenant_sessions": 0}, "tenant_sessions is 0"),
        ({"listen": "tcp://x"}, "tcp://HOST:PORT"),
        ({"listen": "127.0.0.1:5"}, "tcp://HOST:PORT"),
        ({"listen": "tcp://127.0.0.1:5"}, "needs token-file"),
        ({"disk_path": "/d"}, "go together"),
        ({"disk_bytes": 1 << 30}, "go together"),
        ({"disk_path": "/d", "disk_bytes": 1000}, "at least 1MiB"),
        ({"remote_url": "http://x/y"}, "s3://BUCKET"),
        ({"remote_url": "s3://"}, "s3://BUCKET"),
        ({"remote_url": "file://relative"}, "file:///PATH"),
        ({"remote_url": "file:///"}, "file:///PATH"),
        ({"listen": "tcp://[1.2.3.4]:80", "token_file": "t"}, "tcp://HOST:PORT"),
        ({"listen": "tcp://m\u00fcnchen:80", "token_file": "t"}, "tcp://HOST:PORT"),
        ({"metrics": "[:]:80"}, "HOST:PORT"),
        ({"remote_options": {"region": "eu"}}, "no remote"),
        ({"remote_url": "s3://b", "remote_options": {"region": 5}}, "NAME=VALUE"),
        ({"write_policy": "never"}, "write-through, write-back"),
        ({"tenant_quotas": {"me": 5}}, "uid:NUMBER"),
        ({"tenant_quotas": {"*": -1}}, "tenant_quotas"),
        ({"tenant_quotas": {"token:a:b": 5}}, "token:NAME"),
        ({"tenant_quotas": {"token: a": 5}}, "token:NAME"),
        ({"tenant_quotas": {"token:" + "a" * 513: 5}}, "token:NAME"),
        ({"tenant_quotas": {"uid:007": 5}}, "uid:NUMBER"),
        ({"tenant_disk_quotas": {"me": 5}}, "uid:NUMBER"),
        ({"tenant_disk_quotas": {"*": 5}}, "no disk"),
        ({"tenant_remote_quotas": {"*": 5}}, "no remote"),
        ({"verify_memory": 1}, "true or false"),
        ({"metrics": "localhost"}, "HOST:PORT"),
        ({"stall_s": 1.0}, "from 2 to 86400"),
        ({"log_format": "xml"}, "text, json"),
        ({"log_level": "all"}, "debug, info"),
    ],
)
def test_what_is_wrong_is_told_with_the_field_and_what_is_allowed(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        ServerConfig(**{"socket_path": "s", **values})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 9),
        ({"tenant_sessions": 3}, 3),
        ({"allow_uids": frozenset({5})}, 4),
        ({"socket_group": "kv"}, 4),
        ({"token_file": "/t"}, 4),
        ({"token_file": "/t", "max_sessions": 1}, 1),
    ],
)
def test_a_tenant_that_is_not_alone_leaves_half_of_the_sessions(values: dict[str, Any], expected: int) -> None:
    assert sessions_of_a_tenant(ServerConfig(**{"socket_path": "s", "max_sessions": 9, **values})) == expected


def test_secrets_are_in_no_text() -> None:
    config = ServerConfig(
        socket_path="s", remote_url="s3://bucket/prefix", remote_options={"secret_access_key": "hunter2"}
    )
    assert "hunter2" not in repr(config)
    with pytest.raises(ValueError) as caught:
        ServerConfig(socket_path="s", remote_url="s3://me:hunter2@bucket/prefix")
    assert "hunter2" not in str(caught.value)


def test_names_outside_are_all_different_and_variables_follow_from_them() -> None:
    settings = list(server_settings().values())
    assert len({setting.name for setting in settings}) == len(settings) <= 25
    assert server_settings()["disk_bytes"].env == "KVFERRY_DISK_SIZE"
    assert server_settings()["disk_bytes"].key == "disk_size"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost:80", ("localhost", 80)),
        ("[::1]:5555", ("::1", 5555)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        (":9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
    ],
)
def test_hosts_and_ports_are_taken_apart(text: str, expected: tuple[str, int]) -> None:
    assert split_host_port(text) == expected


@pytest.mark.parametrize("text", ["", ":", "::1:5555", "host", "host:", "host:99999", "host:-1", "http://h:1", "a b:1"])
def test_what_is_no_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="brackets"):
        split_host_port(text)
