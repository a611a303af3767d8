"""The operator's page says what the code says: each setting, each measure. Run this file to write its tables anew."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvferry.cache.misses import Miss
from kvferry.cli.config_flags import show_default
from kvferry.cli.config_sources import load_config
from kvferry.config import ServerConfig, server_settings
from kvferry.server.watch.measures import MEASURES

FILE = Path(__file__).parents[2] / "docs" / "cache-server.md"
PAGE = FILE.read_text(encoding="utf-8")


def settings_table() -> str:
    """The table of settings, from their definition."""
    lines = ["| setting | default | what it is | what it may be |", "|---|---|---|---|"]
    for each in fields(ServerConfig):
        setting = server_settings()[each.name]
        again = " May be given again." if setting.kind.repeated else ""
        default = show_default(each) or ""
        lines.append(f"| `--{setting.name}` | {default} | {setting.help}{again} | {setting.allowed} |")
    return "\n".join(lines)


def measures_table() -> str:
    """The table of measures, from their definition."""
    lines = ["| `kvferry_...` | label | |", "|---|---|---|"]
    for name, measure in MEASURES.items():
        suffix = "" if measure.is_gauge else "_total"
        lines.append(f"| `{name}{suffix}` | {measure.label} | {measure.help} |")
    return "\n".join(lines)


@pytest.mark.parametrize("table", [settings_table(), measures_table()], ids=["settings", "measures"])
def test_tables_are_those_of_the_definitions(table: str) -> None:
    assert table in PAGE, f"run `python {Path(__file__).relative_to(FILE.parents[1])}`, which writes the tables anew"


def test_the_file_on_the_page_is_right(tmp_path: Path) -> None:
    (toml,) = re.findall(r"```toml\n(.+?)```", PAGE, re.DOTALL)
    file = tmp_path / "kv.toml"
    file.write_text(toml)
    assert load_config(ServerConfig, {}, file, {}).config.socket_path


def test_every_reason_of_a_miss_is_explained() -> None:
    assert [miss.value for miss in Miss if f"| `{miss.value}` |" not in PAGE] == []


def write_tables() -> None:
    """Put the tables of the definitions in place of those with the same head."""
    page = PAGE
    for table in (settings_table(), measures_table()):
        head = re.escape(table.partition("\n")[0])
        before, _, after = re.split(rf"^({head}\n(?:\|.*\n)+)", page, maxsplit=1, flags=re.MULTILINE)
        page = f"{before}{table}\n{after}"
    FILE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write_tables()
