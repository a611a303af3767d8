"""The values of settings as people write them: in flags, in variables of the environment, in a TOML file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping

from kvferry.cli.sizes import exact_bytes, parse_bytes
from kvferry.settings import Kind, Setting

__all__ = ["from_env", "from_file", "from_texts", "show_value"]

HIDDEN = "***"
_SWITCH = {"true": True, "1": True, "false": False, "0": False}


def from_texts(setting: Setting, texts: list[str]) -> object:
    """The value that words stand for: one, or for a repeated setting each of them.

    What stands for nothing is given back as it is, for `Setting.problem` to say so.
    """
    with contextlib.suppress(ValueError, KeyError, OverflowError):
        if setting.kind.repeated:
            return _REPEATED[setting.kind](texts)
        if len(texts) == 1:
            return _SINGLE[setting.kind](texts[0])
    return texts if setting.kind.repeated else texts[0]


def from_env(setting: Setting, text: str) -> object:
    """The value in a variable: the parts of a repeated setting have commas between them, but words have spaces."""
    if setting.kind is Kind.WORDS:
        return from_texts(setting, text.split())
    return from_texts(setting, [part.strip() for part in text.split(",")] if setting.kind.repeated else [text])


def from_file(setting: Setting, value: object) -> object:
    """The value in a file, where numbers, lists and tables are what they are, or are written as in a flag."""
    if setting.kind is Kind.COUNTS and isinstance(value, list):
        return frozenset(value) if all(type(part) is int for part in value) else value
    if setting.kind is Kind.WORDS and isinstance(value, list):
        return tuple(value) if all(isinstance(part, str) for part in value) else value
    if setting.kind in (Kind.OPTIONS, Kind.SIZES) and isinstance(value, dict):
        read = _size if setting.kind is Kind.SIZES else _word
        with contextlib.suppress(ValueError):
            return {name: read(part) for name, part in value.items()}
        return value
    return from_texts(setting, [value]) if isinstance(value, str) else value


def show_value(setting: Setting, value: object) -> str:
    """The value as it would stand in a file; what may not be shown is not."""
    if setting.kind is Kind.OPTIONS and isinstance(value, Mapping):
        return _table(dict.fromkeys(value, HIDDEN))
    if not setting.is_shown(value):
        return json.dumps(HIDDEN)
    if setting.kind is Kind.SIZE and isinstance(value, int):
        return json.dumps(exact_bytes(value))
    if setting.kind is Kind.SIZES and isinstance(value, Mapping):
        return _table({name: exact_bytes(size) for name, size in value.items()})
    if setting.kind is Kind.SECONDS:
        return f"{value:g}"
    if setting.kind is Kind.COUNTS and isinstance(value, Iterable):
        return json.dumps(sorted(value))
    return json.dumps(value)


def _table(values: Mapping[str, str]) -> str:
    inner = ", ".join(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in values.items())
    return f"{{ {inner} }}" if inner else "{}"


def _pairs(texts: Iterable[str]) -> dict[str, str]:
    """NAME=VALUE of each; a value may hold more of `=`, a tenant's name may not."""
    pairs = [text.partition("=") for text in texts]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("there is no =")
    return {name: value for name, _, value in pairs}


def _size(value: object) -> int:
    if isinstance(value, str):
        return parse_bytes(value)
    if type(value) is int:
        return value
    raise ValueError("no size")


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int)):
        return str(value)
    raise ValueError("no word")


_SINGLE: Mapping[Kind, Callable[[str], object]] = {
    Kind.TEXT: str,
    Kind.SIZE: parse_bytes,
    Kind.COUNT: int,
    Kind.SECONDS: float,
    Kind.SWITCH: lambda text: _SWITCH[text.lower()],
}
_REPEATED: Mapping[Kind, Callable[[list[str]], object]] = {
    Kind.COUNTS: lambda texts: frozenset(int(text) for text in texts),
    Kind.WORDS: tuple,
    Kind.OPTIONS: _pairs,
    Kind.SIZES: lambda texts: {name: parse_bytes(size) for name, size in _pairs(texts).items()},
}
