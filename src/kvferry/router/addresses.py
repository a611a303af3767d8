"""Where engines are. Pure."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from kvferry.settings import join_host_port, split_host_port

__all__ = ["MAX_RANKS", "EngineAddress", "EngineKey", "Role", "clean_address", "parse_engine"]

MAX_RANKS = 64
_SCHEME = "http://"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")


class Role(str, enum.Enum):
    """What an engine does for a request, by the letter that heartbeats use."""

    PREFILL = "P"
    DECODE = "D"


@dataclass(frozen=True)
class EngineKey:
    """What tells one engine from every other: what it does, where, and which data-parallel rank there."""

    role: Role
    http: str
    dp_rank: int | None = None

    def __str__(self) -> str:
        rank = "" if self.dp_rank is None else f" rank {self.dp_rank}"
        return f"{self.role.name.lower()} engine {self.http}{rank}"


@dataclass(frozen=True)
class EngineAddress:
    """An engine's HTTP server, as `HOST:PORT`, and the address of each of its ranks for KV, in their order.

    An engine without addresses for KV neither sends nor takes any. A `legacy` one knows of a transfer by its request id
    only.
    """

    key: EngineKey
    kv: tuple[str, ...] = ()
    legacy: bool = False

    @property
    def url(self) -> str:
        return f"{_SCHEME}{self.key.http}"


def clean_address(text: str) -> str:
    """`HOST:PORT` in its one form. Raises ValueError where it is none, or its port is 0."""
    host, port = split_host_port(text)
    if not port or not (":" in host or _NAME.fullmatch(host)) or "%" in host:
        raise ValueError(f"{text!r} is no address: HOST is a name, or an address without a zone; PORT is 1 to 65535")
    return join_host_port(host, port)


def parse_engine(role: Role, text: str) -> EngineAddress:
    """`http://HOST:PORT=HOST:PORT[,HOST:PORT ...]`: behind the `=` each rank's address for KV. Raises ValueError.

    A decode engine may have none: it then computes prompts itself.
    """
    http, equals, ranks = text.partition("=")
    if not http.startswith(_SCHEME):
        raise ValueError(f"{text!r} does not begin with {_SCHEME}")
    kv = tuple(clean_address(rank) for rank in ranks.split(",")) if equals else ()
    if len(kv) > MAX_RANKS or len(set(kv)) != len(kv):
        raise ValueError(f"{text!r} names more than {MAX_RANKS} ranks, or one twice")
    if role is Role.PREFILL and not kv:
        raise ValueError(f"{text!r} does not say where its KV comes from: add =HOST:PORT for each rank")
    return EngineAddress(EngineKey(role, clean_address(http[len(_SCHEME) :].rstrip("/"))), kv)
