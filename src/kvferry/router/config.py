"""The configuration of the router: built once, checked when made, passed down whole.

Each field carries its `Setting`, from which flags, environment variables, keys of the TOML file and the table in
docs/router.md come. There is no second list.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from kvferry.config import LOG_FORMATS, LOG_LEVELS
from kvferry.router.addresses import EngineAddress, Role, parse_engine
from kvferry.settings import (
    ROUTER_PREFIX,
    Kind,
    Setting,
    check_settings,
    choice,
    is_host_port,
    is_loopback,
    path,
    seconds,
    split_host_port,
)

__all__ = ["RouterConfig", "given_engines"]


def _set(setting: Setting, default: Any = None) -> Any:
    """A field of the router's."""
    return field(default=default, metadata=dataclasses.replace(setting, prefix=ROUTER_PREFIX).metadata)


def _address(name: str, text: str) -> Setting:
    allowed = "HOST:PORT, or :PORT for loopback, with port 0 for any free one"
    return Setting(name=name, kind=Kind.TEXT, help=text, allowed=allowed, check=is_host_port)


def _engines(role: Role, text: str, allowed: str) -> Setting:
    def are_engines(words: tuple[str, ...]) -> bool:
        return len({parse_engine(role, word).key for word in words}) == len(words)

    return Setting(name=role.name.lower(), kind=Kind.WORDS, help=text, allowed=allowed, check=are_engines)


def _count(name: str, text: str) -> Setting:
    return Setting(
        name=name, kind=Kind.COUNT, help=text, allowed="a number of at least 1", check=lambda count: count >= 1
    )


_INSECURE = Setting(
    name="insecure",
    kind=Kind.SWITCH,
    help="Take heartbeats without a secret at an address that other machines reach: whoever does is sent prompts.",
    allowed="true or false",
    check=lambda _: True,
)
_MAX_BODY = Setting(
    name="max-body",
    kind=Kind.SIZE,
    help="The largest request.",
    allowed="a size of at least 1KiB, for example 32MiB",
    check=lambda size: size >= 1 << 10,
)
_PREFILL = _engines(
    Role.PREFILL,
    "A prefill engine that sends no heartbeats: its HTTP server, and the address for KV of each rank.",
    "different http://HOST:PORT=HOST:PORT, with ,HOST:PORT for each further rank",
)
_DECODE = _engines(
    Role.DECODE,
    "A decode engine that sends no heartbeats, as for prefill; without =HOST:PORT it computes prompts itself.",
    "different http://HOST:PORT or http://HOST:PORT=HOST:PORT, with ,HOST:PORT for each further rank",
)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How one router runs. What a field means, and may be, is said beside it."""

    listen: str = _set(_address("listen", "Where clients ask. Nothing is encrypted."), "127.0.0.1:10001")
    heartbeat: str | None = _set(
        _address("heartbeat", "Where engines say that they are there: their proxy_ip and proxy_port.")
    )
    token_file: str | None = _set(
        path("token-file", "File with the secret that all engines share; heartbeats without it are refused.")
    )
    insecure: bool = _set(_INSECURE, False)
    prefill: tuple[str, ...] = _set(_PREFILL, ())
    decode: tuple[str, ...] = _set(_DECODE, ())
    engine_timeout_s: float = _set(
        seconds("engine-timeout", "An engine that was silent for so long has left.", 0.1), 10.0
    )
    request_timeout_s: float = _set(
        seconds("request-timeout", "What one request may take, to its last byte.", 0.1), 600.0
    )
    max_body_bytes: int = _set(_MAX_BODY, 32 << 20)
    max_requests: int = _set(_count("max-requests", "Requests at one time."), 1024)
    max_engines: int = _set(_count("max-engines", "Engines at one time that come by heartbeat."), 256)
    drain_s: float = _set(seconds("drain-s", "How long the end may wait for requests that are under way.", 0), 30.0)
    log_format: str = _set(choice("log-format", "How records are written, one a line.", LOG_FORMATS), "text")
    log_level: str = _set(choice("log-level", "The least that is written.", LOG_LEVELS), "info")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.heartbeat is None and not self.decode:
            raise ValueError(
                "no engine can come: give --heartbeat HOST:PORT (the engines' proxy_ip and proxy_port), or at "
                "least one engine by --decode"
            )
        trusts = self.insecure or self.token_file is not None
        if self.heartbeat is not None and not (trusts or is_loopback(split_host_port(self.heartbeat)[0])):
            raise ValueError(
                f"heartbeat {self.heartbeat} can be reached from other machines, and whoever reaches it can have "
                "prompts sent to any address: give the engines' token_file, or say insecure where the network itself "
                "keeps strangers away"
            )


def given_engines(config: RouterConfig) -> list[EngineAddress]:
    """The engines that the configuration names."""
    words = [(Role.PREFILL, word) for word in config.prefill] + [(Role.DECODE, word) for word in config.decode]
    return [parse_engine(role, word) for role, word in words]
