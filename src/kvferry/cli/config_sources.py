"""Where settings come from: flags, before the environment, before a file, before the defaults."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.cli.config_values import from_env, from_file, from_texts
from kvferry.config import ServerConfig, server_settings
from kvferry.settings import Setting

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["CONFIG_VARIABLE", "Loaded", "load_config"]

CONFIG_VARIABLE = "KVFERRY_CONFIG"
_PREFIX = "KVFERRY_"
# Of other parts of KVferry, and of its scripts.
_OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "KVFERRY_NCCL_SO_PATH", "KVFERRY_RESULTS", "KVFERRY_PYTEST_ARGS"})
# What Kubernetes sets in every pod beside a Service whose name begins with "kvferry".
_SERVICE_LINK = re.compile(r".*_(SERVICE_(HOST|PORT)(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")


class Given(NamedTuple):
    """A value, and where it was found, for people."""

    value: object
    source: str


@dataclass(frozen=True)
class Loaded:
    """A configuration, and where each field's value comes from."""

    config: ServerConfig
    sources: Mapping[str, str]


def load_config(flags: Mapping[str, Any], file: Path | None, environ: Mapping[str, str]) -> Loaded:
    """The configuration that all sources together make.

    `flags` are what was given on the command line by the fields' names, None or empty where nothing was. Raises
    ValueError with one line that names the setting, its source and what is allowed.
    """
    if file is None and CONFIG_VARIABLE in environ:
        if not environ[CONFIG_VARIABLE]:
            raise ValueError(f"{CONFIG_VARIABLE} is empty; it must be the path of a TOML file, or not be set")
        file = Path(environ[CONFIG_VARIABLE])
    layers = ({} if file is None else _from_file(file), _from_environment(environ), _from_flags(flags))
    settings, given = server_settings(), dict[str, Given]()
    for layer in layers:
        for field, (value, source) in layer.items():  # also what a later layer hides has to be right
            problem = settings[field].problem(value)
            if problem is not None:
                raise ValueError(f"{settings[field].name} ({source}) {problem}")
        given |= layer
    for each in fields(ServerConfig):
        if each.name not in given and each.default is MISSING and each.default_factory is MISSING:
            setting = settings[each.name]
            raise ValueError(
                f"{setting.name} is not set: give --{setting.name}, {setting.env}, or {setting.key} in the file; "
                f"it must be {setting.allowed}"
            )
    values: dict[str, Any] = {field: value for field, (value, _) in given.items()}
    sources = {field: given[field].source if field in given else "default" for field in settings}
    return Loaded(ServerConfig(**values), sources)


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for field, setting in server_settings().items():
        value = flags.get(field)
        if value is not None and value != []:
            texts = value if isinstance(value, list) else [value]
            parsed = value if isinstance(value, bool) else from_texts(setting, texts)
            found[field] = Given(parsed, f"flag --{setting.name}")
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    by_name = {setting.env: (field, setting) for field, setting in server_settings().items()}
    ours = {name for name in environ if name.startswith(_PREFIX)}
    unknown = [name for name in ours - set(by_name) - _OTHER_VARIABLES if not _SERVICE_LINK.fullmatch(name)]
    _refuse_unknown(unknown, by_name, "the environment: unknown variable")
    return {
        field: Given(from_env(setting, environ[name]), f"environment {name}")
        for name, (field, setting) in by_name.items()
        if name in environ
    }


def _from_file(path: Path) -> dict[str, Given]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the configuration file {path} is no TOML: {error}") from None
    by_key: dict[str, tuple[str, Setting]] = {s.key: (field, s) for field, s in server_settings().items()}
    _refuse_unknown([key for key in data if key not in by_key], by_key, f"{path}: unknown key")
    return {
        by_key[key][0]: Given(from_file(by_key[key][1], value), f"file {path}, key {key}")
        for key, value in data.items()
    }


def _refuse_unknown(unknown: list[str], known: Iterable[str], where: str) -> None:
    names = list(known)
    told = []
    for name in sorted(unknown):
        (nearest,) = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        told.append(f"{name!r} (the nearest known one is {nearest})")
    if told:
        raise ValueError(f"{where} {', '.join(told)}")
