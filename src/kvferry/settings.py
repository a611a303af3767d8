"""What a setting is: its name outside, how its value is written, and what it may be. Pure vocabulary."""

from __future__ import annotations

import enum
import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import unquote, urlsplit

METADATA = "setting"
SERVER_PREFIX = "KVFERRY_"  # of the environment's variables
ROUTER_PREFIX = "KVFERRY_ROUTE_"
LOOPBACK = "127.0.0.1"
MAX_TOKEN_NAME_BYTES = 512


class Kind(enum.Enum):
    """What a setting's value is, and so how it is written."""

    TEXT = "text"
    SIZE = "size"
    COUNT = "whole number"
    SECONDS = "seconds"
    SWITCH = "true or false"
    COUNTS = "whole numbers"
    WORDS = "words"
    OPTIONS = "NAME=VALUE"
    SIZES = "NAME=SIZE"

    @property
    def repeated(self) -> bool:
        """Whether the value has several parts, so that its flag may be given again."""
        return self in (Kind.COUNTS, Kind.WORDS, Kind.OPTIONS, Kind.SIZES)

    @property
    def types(self) -> tuple[type, ...]:
        """The types that a value may have."""
        return _TYPES.get(self, (str,))


_TYPES = {
    Kind.SIZE: (int,),
    Kind.COUNT: (int,),
    Kind.SECONDS: (int, float),
    Kind.SWITCH: (bool,),
    Kind.COUNTS: (frozenset, set, list, tuple),
    Kind.WORDS: (tuple,),
    Kind.OPTIONS: (Mapping,),
    Kind.SIZES: (Mapping,),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How one field of a configuration is set from outside.

    `name` is the flag without its dashes, and, with `_` for `-`, the key of the file and the environment's variable
    after `prefix`. `allowed` says in words what `check` lets pass; `shown` which values may be shown to people.
    """

    name: str
    kind: Kind
    help: str
    allowed: str
    check: Callable[[Any], bool]
    shown: Callable[[Any], bool] = lambda _: True
    prefix: str = SERVER_PREFIX

    @property
    def metadata(self) -> Mapping[str, Setting]:
        """For the dataclass field that this sets."""
        return {METADATA: self}

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def env(self) -> str:
        return f"{self.prefix}{self.key.upper()}"

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, None where nothing is."""
        try:
            right = isinstance(value, self.kind.types) and isinstance(value, bool) == (self.kind is Kind.SWITCH)
            if right and self.check(value):
                return None
        except (TypeError, ValueError, AttributeError):
            pass  # as wrong as what the check says no to
        return f"{f'is {value!r}' if self.is_shown(value) else 'is wrong'}; it must be {self.allowed}"

    def is_shown(self, value: object) -> bool:
        """Whether people may see the value; what is no value at all may be anything."""
        try:
            return self.shown(value)
        except (TypeError, ValueError, AttributeError):
            return False


def settings_of(config: type[Any]) -> dict[str, Setting]:
    """How each field of a configuration is set, by the field's name."""
    return {each.name: each.metadata[METADATA] for each in fields(config)}


def check_settings(config: Any) -> None:
    """Raise ValueError, with one line, where a field of a configuration is not what its setting allows."""
    for each in fields(config):
        value = getattr(config, each.name)
        if value is None and each.default is None:
            continue
        problem = each.metadata[METADATA].problem(value)
        if problem is not None:
            raise ValueError(f"{each.name} {problem}")


def choice(name: str, text: str, choices: tuple[str, ...]) -> Setting:
    """One of a few words."""
    allowed = f"one of {', '.join(choices)}"
    return Setting(name=name, kind=Kind.TEXT, help=text, allowed=allowed, check=lambda value: value in choices)


def path(name: str, text: str) -> Setting:
    """A path of the file system."""
    return Setting(name=name, kind=Kind.TEXT, help=text, allowed="a path", check=lambda p: bool(p) and "\0" not in p)


def quotas(name: str, what: str) -> Setting:
    """A size for each tenant."""
    return Setting(
        name=name,
        kind=Kind.SIZES,
        help=f"How much {what} a tenant may fill; `*` stands for those that are not named.",
        allowed="TENANT=SIZE, a tenant being `uid:NUMBER`, `token:NAME` or `*`",
        check=are_quotas,
    )


def seconds(name: str, text: str, least: float) -> Setting:
    """A span of time of at most a day."""
    return Setting(
        name=name,
        kind=Kind.SECONDS,
        help=text,
        allowed=f"a number of seconds from {least:g} to 86400",
        check=lambda value: math.isfinite(value) and least <= value <= 86_400,
    )


def split_host_port(text: str) -> tuple[str, int]:
    """`HOST:PORT`, an IPv6 address in brackets, as both; without a host it is loopback. Raises ValueError."""
    match = re.fullmatch(r"(?:\[([^\s\[\]/@?#]+)\]|([^\s:/\[\]@?#]*)):([0-9]{1,5})", text)
    try:
        if match is None or int(match[3]) > 65_535 or not (text.isascii() and text.isprintable()):
            raise ValueError
        if match[1]:
            ipaddress.IPv6Address(match[1])
    except ValueError:
        hint = "HOST is a name in ASCII or an address, that of IPv6 in brackets, as in [::1]:9464; PORT is 0 to 65535"
        raise ValueError(f"{text!r} is no HOST:PORT; {hint}") from None
    return match[1] or match[2] or LOOPBACK, int(match[3])


def join_host_port(host: str, port: int) -> str:
    """`HOST:PORT`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it; False for a name other than localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_host_port(text: str) -> bool:
    """Whether it is; raises ValueError where not."""
    return bool(split_host_port(text))


def split_remote_url(url: str) -> tuple[str, str, str]:
    """An object store's URL as scheme, bucket (none of a file) and prefix, or folder, without slashes at its ends.

    Raises ValueError, whose text holds nothing of the URL beyond its scheme, bucket and path.
    """
    parts = urlsplit(url)
    where = f"the remote URL {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if parts.scheme not in ("s3", "file"):
        raise ValueError(f"{where} is of no known kind; use s3://BUCKET/PREFIX or file:///FOLDER")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{where} has more than bucket and path: give credentials and settings as remote options")
    bucket, prefix = parts.netloc, unquote(parts.path).strip("/")
    if parts.scheme == "s3" and not bucket:
        raise ValueError(f"{where} names no bucket; use s3://BUCKET/PREFIX")
    if parts.scheme == "file" and (bucket or not prefix):
        raise ValueError(f"{where} names no folder of this host; use file:///FOLDER, from the root on")
    return parts.scheme, bucket, prefix


def is_remote_url(url: str) -> bool:
    """Whether it is an object store's, and holds no credentials; raises ValueError where not."""
    return bool(split_remote_url(url))


def is_token_name(name: str) -> bool:
    """Whether a token, and with it a tenant, may be called so."""
    return 0 < len(name.encode()) <= MAX_TOKEN_NAME_BYTES and ":" not in name and name == name.strip()


def are_quotas(quotas: Mapping[str, int]) -> bool:
    """Whether all names are tenants', as the server writes them, and all sizes sizes."""
    return all(_is_tenant(name) and size >= 0 for name, size in quotas.items())


def _is_tenant(name: str) -> bool:
    kind, _, rest = name.partition(":")
    if kind == "token":
        return is_token_name(rest)
    return name == "*" or (kind == "uid" and re.fullmatch(r"0|[1-9][0-9]{0,9}", rest) is not None)


def are_options(options: Mapping[str, str]) -> bool:
    """Whether all names and values are words."""
    return all(isinstance(name, str) and name and isinstance(value, str) for name, value in options.items())
