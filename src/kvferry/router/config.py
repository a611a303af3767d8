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
    seconds,
    split_host_port,
)

__all__ = ["RouterConfig", "given_engines"]


def _set_by(setting: Setting) -> Any:
    """For the metadata of a field of the router's."""
    return dataclasses.replace(setting, prefix=ROUTER_PREFIX).metadata


def _engines(role: Role, name: str, text: str, allowed: str) -> Any:
    def are_engines(words: tuple[str, ...]) -> bool:
        return len({parse_engine(role, word).key for word in words}) == len(words)

    setting = Setting(name=name, kind=Kind.WORDS, help=text, allowed=allowed, check=are_engines)
    return field(default=(), metadata=_set_by(setting))


def _count(name: str, text: str) -> Setting:
    return Setting(
        name=name, kind=Kind.COUNT, help=text, allowed="a number of at least 1", check=lambda count: count >= 1
    )


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How one router runs. What a field means, and may be, is said beside it."""

    listen: str = field(
        default="127.0.0.1:10001",
        metadata=_set_by(
            Setting(
                name="listen",
                kind=Kind.TEXT,
                help="Where clients ask. Nothing is encrypted.",
                allowed="HOST:PORT, or :PORT for loopback, with port 0 for any free one",
                check=is_host_port,
            )
        ),
    )
    heartbeat: str | None = field(
        default=None,
        metadata=_set_by(
            Setting(
                name="heartbeat",
                kind=Kind.TEXT,
                help="Where engines say that they are there: their proxy_ip and proxy_port.",
                allowed="HOST:PORT, or :PORT for loopback, with port 0 for any free one",
                check=is_host_port,
            )
        ),
    )
    insecure: bool = field(
        default=False,
        metadata=_set_by(
            Setting(
                name="insecure",
                kind=Kind.SWITCH,
                help="Take heartbeats at an address that other machines reach: whoever does is sent prompts.",
                allowed="true or false",
                check=lambda _: True,
            )
        ),
    )
    prefill: tuple[str, ...] = _engines(
        Role.PREFILL,
        "prefill",
        "A prefill engine that sends no heartbeats: its HTTP server, and the address for KV of each rank.",
        "different http://HOST:PORT=HOST:PORT, with ,HOST:PORT for each further rank",
    )
    decode: tuple[str, ...] = _engines(
        Role.DECODE,
        "decode",
        "A decode engine that sends no heartbeats, as for prefill; without =HOST:PORT it computes prompts itself.",
        "different http://HOST:PORT or http://HOST:PORT=HOST:PORT, with ,HOST:PORT for each further rank",
    )
    engine_timeout_s: float = field(
        default=10.0,
        metadata=_set_by(seconds("engine-timeout", "An engine that was silent for so long has left.", 0.1)),
    )
    request_timeout_s: float = field(
        default=600.0,
        metadata=_set_by(seconds("request-timeout", "What one request may take, to its last byte.", 0.1)),
    )
    max_body_bytes: int = field(
        default=32 << 20,
        metadata=_set_by(
            Setting(
                name="max-body",
                kind=Kind.SIZE,
                help="The largest request.",
                allowed="a size of at least 1KiB, for example 32MiB",
                check=lambda size: size >= 1 << 10,
            )
        ),
    )
    max_requests: int = field(default=1024, metadata=_set_by(_count("max-requests", "Requests at one time.")))
    max_engines: int = field(
        default=256, metadata=_set_by(_count("max-engines", "Engines at one time that come by heartbeat."))
    )
    drain_s: float = field(
        default=30.0,
        metadata=_set_by(seconds("drain-s", "How long the end may wait for requests that are under way.", 0)),
    )
    log_format: str = field(
        default="text", metadata=_set_by(choice("log-format", "How records are written, one a line.", LOG_FORMATS))
    )
    log_level: str = field(
        default="info", metadata=_set_by(choice("log-level", "The least that is written.", LOG_LEVELS))
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.heartbeat is None and not self.decode:
            raise ValueError("no engine can come: give heartbeat, or the address of at least one decode engine")
        if self.heartbeat is not None and not (self.insecure or is_loopback(split_host_port(self.heartbeat)[0])):
            raise ValueError(
                f"heartbeat {self.heartbeat} can be reached from other machines, and whoever reaches it can have "
                "prompts sent to any address: say insecure where the network itself keeps strangers away"
            )


def given_engines(config: RouterConfig) -> list[EngineAddress]:
    """The engines that the configuration names."""
    words = [(Role.PREFILL, word) for word in config.prefill] + [(Role.DECODE, word) for word in config.decode]
    return [parse_engine(role, word) for role, word in words]
