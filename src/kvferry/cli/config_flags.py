"""The settings of a configuration as options of a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from kvferry.cli.config_values import show_value
from kvferry.settings import METADATA, Kind, Setting

__all__ = ["show_default", "with_settings"]

_METAVARS = {
    Kind.SIZE: "SIZE",
    Kind.COUNT: "NUMBER",
    Kind.COUNTS: "NUMBER",
    Kind.WORDS: "TEXT",
    Kind.SECONDS: "SECONDS",
    Kind.TEXT: "TEXT",
}


def with_settings(config: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting of a configuration.

    Its first argument gets what was given for them, by the fields' names; None or an empty list where nothing was.
    Values are checked where all sources come together, so that a wrong one is told in the same words from everywhere.
    """
    return functools.partial(_with_options, [_option(each) for each in fields(config)])


def _with_options(options: list[inspect.Parameter], command: Callable[..., None]) -> Callable[..., None]:
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        flags = {option.name: given.pop(option.name) for option in options}
        command(flags, **given)

    parameters = [*options, *own]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def show_default(each: Field[Any]) -> str | None:
    """A field's default as people write it; None where it has none to show."""
    setting: Setting = each.metadata[METADATA]
    if each.default is MISSING or each.default is None:
        return None
    return show_value(setting, each.default).strip('"') if each.default or setting.kind is Kind.SWITCH else None


def _option(each: Field[Any]) -> inspect.Parameter:
    setting: Setting = each.metadata[METADATA]
    flag = f"--{setting.name}"
    kind: Any = str | None
    if setting.kind is Kind.SWITCH:
        flag, kind = f"{flag}/--no-{setting.name}", bool | None
    elif setting.kind.repeated:
        kind = list[str] | None
    default = show_default(each)
    more = " May be given again." if setting.kind.repeated else f" Default: {default}." if default else ""
    metavar = None if setting.kind is Kind.SWITCH else _METAVARS.get(setting.kind, setting.kind.value)
    option = typer.Option(flag, help=setting.help + more, metavar=metavar, show_default=False)
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )
