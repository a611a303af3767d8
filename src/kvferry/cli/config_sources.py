"""Where settings come from: flags, before the environment, before a file, before the defaults."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from kvferry.cli.config_values import from_env, from_file, from_texts
from kvferry.settings import ROUTER_PREFIX, SERVER_PREFIX, Setting, settings_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Loaded", "load_config"]

Config = TypeVar("Config")

# Of other parts of KVferry, and of its scripts.
_OTHER_VARIABLES = frozenset({"KVFERRY_NCCL_SO_PATH", "KVFERRY_RESULTS", "KVFERRY_PYTEST_ARGS"})
# What Kubernetes sets in every pod beside a Service whose name begins with "kvferry".
_SERVICE_LINK = re.compile(r".*_(SERVICE_(HOST|PORT)(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")


class Given(NamedTuple):
    """A value, and where it was found, for people."""

    value: object
    source: str


@dataclass(frozen=True)
class Loaded(Generic[Config]):
    """A configuration, and where each field's value comes from."""

    config: Config
    sources: Mapping[str, str]


def load_config(
    kind: type[Config], flags: Mapping[str, Any], file: Path | None, environ: Mapping[str, str]
) -> Loaded[Config]:
    """The configuration that all sources together make.

    `kind` is a dataclass whose fields carry settings, all of one prefix. `flags` are what was given on the command line
    by the fields' names, None or empty where nothing was. Raises ValueError with one line that names the setting, its
    source and what is allowed.
    """
    settings, given = settings_of(kind), dict[str, Given]()
    file = file or _file_of(settings, environ)
    layers = (
        {} if file is None else _from_file(settings, file),
        _from_environment(settings, environ),
        _from_flags(settings, flags),
    )
    for layer in layers:
        for field, (value, source) in layer.items():  # also what a later layer hides has to be right
            problem = settings[field].problem(value)
            if problem is not None:
                raise ValueError(f"{settings[field].name} ({source}) {problem}")
        given |= layer
    for each in fields(kind):  # type: ignore[arg-type]
        if each.name not in given and each.default is MISSING and each.default_factory is MISSING:
            setting = settings[each.name]
            raise ValueError(
                f"{setting.name} is not set: give --{setting.name}, {setting.env}, or {setting.key} in the file; "
                f"it must be {setting.allowed}"
            )
    values: dict[str, Any] = {field: value for field, (value, _) in given.items()}
    sources = {field: given[field].source if field in given else "default" for field in settings}
    return Loaded(kind(**values), sources)


def _prefix(settings: Mapping[str, Setting]) -> str:
    return next(iter(settings.values())).prefix


def _file_of(settings: Mapping[str, Setting], environ: Mapping[str, str]) -> Path | None:
    """The file that the environment names."""
    variable = f"{_prefix(settings)}CONFIG"
    if variable not in environ:
        return None
    if not environ[variable]:
        raise ValueError(f"{variable} is empty; it must be the path of a TOML file, or not be set")
    return Path(environ[variable])


def _from_flags(settings: Mapping[str, Setting], flags: Mapping[str, Any]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for field, setting in settings.items():
        value = flags.get(field)
        if value is not None and value != []:
            texts = value if isinstance(value, list) else [value]
            parsed = value if isinstance(value, bool) else from_texts(setting, texts)
            found[field] = Given(parsed, f"flag --{setting.name}")
    return found


def _from_environment(settings: Mapping[str, Setting], environ: Mapping[str, str]) -> dict[str, Given]:
    by_name = {setting.env: (field, setting) for field, setting in settings.items()}
    prefix = _prefix(settings)
    ours = {name for name in environ if name.startswith(prefix)} - {f"{prefix}CONFIG"} - _OTHER_VARIABLES
    if prefix == SERVER_PREFIX:
        ours = {name for name in ours if not name.startswith(ROUTER_PREFIX)}
    unknown = [name for name in ours - set(by_name) if not _SERVICE_LINK.fullmatch(name)]
    _refuse_unknown(unknown, by_name, "the environment: unknown variable")
    return {
        field: Given(from_env(setting, environ[name]), f"environment {name}")
        for name, (field, setting) in by_name.items()
        if name in environ
    }


def _from_file(settings: Mapping[str, Setting], path: Path) -> dict[str, Given]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the configuration file {path} is no TOML: {error}") from None
    by_key: dict[str, tuple[str, Setting]] = {s.key: (field, s) for field, s in settings.items()}
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
