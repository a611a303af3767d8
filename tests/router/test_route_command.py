"""`kvferry route` as a command: its settings from all sources, its errors, its page in the docs.

Run this file to write the page's tables anew.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.config_flags import show_default
from kvferry.cli.config_sources import load_config
from kvferry.cli.config_view import view_config
from kvferry.router.config import RouterConfig, given_engines
from kvferry.router.measures import LABELS, MEASURES
from kvferry.settings import Kind, settings_of

FILE = Path(__file__).parents[2] / "docs" / "router.md"
SETTINGS = settings_of(RouterConfig)
# Per field: the words of a flag, and what they mean. None is its default.
CASES: dict[str, tuple[list[str], object]] = {
    "listen": ([":0"], ":0"),
    "heartbeat": ([":30001"], ":30001"),
    "token_file": (["/etc/token"], "/etc/token"),
    "insecure": (["true"], True),
    "prefill": (["http://a:1=a:2,a:3", "http://b:1=b:2"], ("http://a:1=a:2,a:3", "http://b:1=b:2")),
    "decode": (["http://a:1", "http://b:1=b:2"], ("http://a:1", "http://b:1=b:2")),
    "engine_timeout_s": (["2.5"], 2.5),
    "request_timeout_s": (["60"], 60.0),
    "max_body_bytes": (["1MiB"], 1 << 20),
    "max_requests": (["7"], 7),
    "max_engines": (["7"], 7),
    "drain_s": (["0"], 0.0),
    "log_format": (["json"], "json"),
    "log_level": (["debug"], "debug"),
}
NEEDS = {"decode": ["http://z:1"]}


def as_flags(field: str, words: list[str]) -> dict[str, Any]:
    kind = SETTINGS[field].kind
    return {field: words if kind.repeated else True if kind is Kind.SWITCH else words[0]}


def settings_table() -> str:
    lines = ["| setting | default | what it is | what it may be |", "|---|---|---|---|"]
    for each in fields(RouterConfig):
        setting = SETTINGS[each.name]
        again = " May be given again." if setting.kind.repeated else ""
        lines.append(f"| `--{setting.name}` | {show_default(each) or ''} | {setting.help}{again} | {setting.allowed} |")
    return "\n".join(lines)


def measures_table() -> str:
    lines = ["| `kvferry_router_...` | label | |", "|---|---|---|"]
    for name, measure in MEASURES.items():
        suffix = "_total" if measure.kind == "counter" else ""
        values = f"{measure.label}: {', '.join(LABELS[name])}" if measure.label else ""
        lines.append(f"| `{name}{suffix}` | {values} | {measure.help} |")
    return "\n".join(lines)


def test_there_is_a_case_for_each_field() -> None:
    assert set(CASES) == set(SETTINGS)
    assert all(setting.env.startswith("KVFERRY_ROUTE_") for setting in SETTINGS.values())


@pytest.mark.parametrize("by", ["flag", "environment", "file"])
@pytest.mark.parametrize("field", CASES)
def test_each_key_works_from_each_source(tmp_path: Path, field: str, by: str) -> None:
    words, expected = CASES[field]
    setting = SETTINGS[field]
    flags: dict[str, Any] = {} if field == "decode" else dict(NEEDS)
    environ, file = {"KVFERRY_SOCKET": "of the server"}, None
    if by == "flag":
        flags |= as_flags(field, words)
    elif by == "environment":
        environ[setting.env] = " ".join(words)
    else:
        file = tmp_path / "router.toml"
        value = words if setting.kind.repeated else words[0]
        file.write_text(f"{setting.key} = {words[0] if setting.kind is Kind.SWITCH else json.dumps(value)}")
    loaded = load_config(RouterConfig, flags, file, environ)
    assert getattr(loaded.config, field) == expected
    assert loaded.sources[field].startswith(by)


def test_the_file_may_be_named_by_a_variable_of_the_routers_own(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text('decode = ["http://a:1"]')
    environ = {"KVFERRY_ROUTE_CONFIG": str(file), "KVFERRY_CONFIG": "the server's"}
    assert load_config(RouterConfig, {}, None, environ).config.decode == ("http://a:1",)


def test_the_printed_configuration_is_a_file_that_means_the_same(tmp_path: Path) -> None:
    flags: dict[str, Any] = {}
    for field, (words, _) in CASES.items():
        flags |= as_flags(field, words)
    loaded = load_config(RouterConfig, flags, None, {})
    file = tmp_path / "router.toml"
    file.write_text(view_config(loaded))
    assert load_config(RouterConfig, {}, file, {}).config == loaded.config


def test_the_engines_are_those_that_are_named() -> None:
    config = RouterConfig(prefill=("http://a:1=a:2",), decode=("http://b:1", "http://c:1=c:2"))
    assert [str(one.key) for one in given_engines(config)] == [
        "prefill engine a:1",
        "decode engine b:1",
        "decode engine c:1",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give --heartbeat HOST:PORT (the engines' proxy_ip and proxy_port), or at least one engine by --decode"),
        (["--decode", "b:1"], "different http://HOST:PORT"),
        (["--decode", "http://b:1", "--decode", "http://b:1"], "different http://HOST:PORT"),
        (["--decode", "http://b:1", "--prefill", "http://a:1"], "http://HOST:PORT=HOST:PORT"),
        (["--heartbeat", "10.0.0.1:30001"], "insecure"),
        (["--heartbeat", ":0", "--token-file", "/no/such/file"], "token_file: [Errno 2]"),
        (["--decode", "http://b:1", "--listen", "256.0.0.1:1"], "clients cannot be heard"),
        (["--heartbeat", "[::2]:1", "--insecure"], "heartbeats cannot be heard"),
    ],
)
def test_bad_options_are_one_line_and_no_trace(arguments: list[str], text: str) -> None:
    command = [sys.executable, "-m", "kvferry", "route", "--listen", ":0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


def test_an_address_that_somebody_has_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "kvferry", "route", "--decode", "http://b:1", "--listen", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 2
    assert f"clients cannot be heard at {address}" in done.stderr


def test_it_may_open_as_many_files_as_the_system_lets_it() -> None:
    command = [sys.executable, "-m", "kvferry", "route", "--decode", "http://127.0.0.1:1", "--listen", ":0"]
    low = ["sh", "-c", 'ulimit -Sn 64; ulimit -Hn 500; exec "$@"', "sh", *command, "--until-stdin-closes"]
    with subprocess.Popen(
        low, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as route:
        assert route.stdout is not None
        assert route.stdout.readline().startswith("ready:")
        limits = Path(f"/proc/{route.pid}/limits").read_text()
        _, errors = route.communicate(timeout=40)
    assert re.search(r"Max open files +500 +500 ", limits)
    assert "the limit of open files is 500 (`ulimit -Hn`); 1024 requests want 3136" in errors


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "h11"])
def test_without_its_packages_it_says_how_to_get_them(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from kvferry.cli.main import main; "
    code += "sys.argv[1:] = ['route', '--decode', 'http://b:1', '--listen', ':0']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 2
    assert done.stderr == f"kvferry: the router needs the package {package}: pip install 'kvferry[route]'\n"


def test_it_needs_no_torch() -> None:
    code = "import sys, kvferry.cli.route; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("table", [settings_table(), measures_table()], ids=["settings", "measures"])
def test_tables_are_those_of_the_definitions(table: str) -> None:
    assert table in FILE.read_text(), "run this file, which writes the tables anew"


def test_the_file_on_the_page_is_right(tmp_path: Path) -> None:
    (toml,) = re.findall(r"```toml\n(.+?)```", FILE.read_text(), re.DOTALL)
    file = tmp_path / "router.toml"
    file.write_text(toml)
    assert load_config(RouterConfig, {}, file, {}).config.heartbeat


def write_tables() -> None:
    """Put the tables of the definitions in place of those with the same head."""
    page = FILE.read_text(encoding="utf-8")
    for table in (settings_table(), measures_table()):
        head = re.escape(table.partition("\n")[0])
        before, _, after = re.split(rf"^({head}\n(?:\|.*\n)+)", page, maxsplit=1, flags=re.MULTILINE)
        page = f"{before}{table}\n{after}"
    FILE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write_tables()
