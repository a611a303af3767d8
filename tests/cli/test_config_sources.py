"""Settings from flags, variables and a file: each key once by each of them, and what is said where one is wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.cli import config_sources
from kvferry.cli import main as cli
from kvferry.cli.config_sources import Loaded, load_config
from kvferry.cli.config_view import view_config
from kvferry.config import ServerConfig, server_settings
from kvferry.settings import Kind

# Per field: the words of a flag, and what they mean. None is its default. What else the field needs is beside it.
CASES: dict[str, tuple[list[str], object]] = {
    "socket_path": (["/run/other.sock"], "/run/other.sock"),
    "listen": (["tcp://127.0.0.1:0"], "tcp://127.0.0.1:0"),
    "token_file": (["/etc/tokens"], "/etc/tokens"),
    "memory_bytes": (["1.5GiB"], 3 << 29),
    "device": (["cpu"], "cpu"),
    "allow_uids": (["5", "7"], frozenset({5, 7})),
    "socket_group": (["kv"], "kv"),
    "lease_ttl_s": (["12.5"], 12.5),
    "max_sessions": (["9"], 9),
    "disk_path": (["/var/kv"], "/var/kv"),
    "disk_bytes": (["2TiB"], 2 << 40),
    "remote_url": (["s3://bucket/prefix"], "s3://bucket/prefix"),
    "remote_options": (["region=eu", "secret_access_key=a=b"], {"region": "eu", "secret_access_key": "a=b"}),
    "write_policy": (["write-back"], "write-back"),
    "tenant_quotas": (["uid:5=1GiB", "*=64KiB"], {"uid:5": 1 << 30, "*": 1 << 16}),
    "tenant_disk_quotas": (["uid:5=1GiB", "*=0"], {"uid:5": 1 << 30, "*": 0}),
    "tenant_remote_quotas": (["token:a=1GiB"], {"token:a": 1 << 30}),
    "tenant_sessions": (["7"], 7),
    "verify_memory": (["true"], True),
    "metrics": ([":0"], ":0"),
    "stall_s": (["3"], 3.0),
    "drain_s": (["3"], 3.0),
    "log_format": (["json"], "json"),
    "log_level": (["debug"], "debug"),
}
NEEDS: dict[str, dict[str, list[str]]] = {
    "listen": {"token_file": ["/etc/tokens"]},
    "disk_path": {"disk_bytes": ["1GiB"]},
    "disk_bytes": {"disk_path": ["/var/kv"]},
    "remote_options": {"remote_url": ["s3://bucket"]},
    "tenant_disk_quotas": {"disk_path": ["/var/kv"], "disk_bytes": ["1GiB"]},
    "tenant_remote_quotas": {"remote_url": ["s3://bucket"]},
}
SETTINGS = server_settings()


def given_beside(field: str) -> dict[str, list[str]]:
    """What has to be set for `field` to be accepted."""
    return {**({} if field == "socket_path" else {"socket_path": ["s"]}), **NEEDS.get(field, {})}


def as_flags(words: Mapping[str, list[str]]) -> dict[str, Any]:
    """What typer makes of flags."""
    return {
        field: texts if SETTINGS[field].kind.repeated else True if SETTINGS[field].kind is Kind.SWITCH else texts[0]
        for field, texts in words.items()
    }


def as_environment(words: Mapping[str, list[str]]) -> dict[str, str]:
    return {SETTINGS[field].env: ",".join(texts) for field, texts in words.items()}


def as_toml(words: Mapping[str, list[str]]) -> str:
    lines = []
    for field, texts in words.items():
        kind, key = SETTINGS[field].kind, SETTINGS[field].key
        if kind in (Kind.OPTIONS, Kind.SIZES):
            pairs = [text.split("=", 1) for text in texts]
            lines.append(f"{key} = {{ {', '.join(f'{json.dumps(a)} = {json.dumps(b)}' for a, b in pairs)} }}")
        elif kind in (Kind.COUNT, Kind.SECONDS, Kind.SWITCH):
            lines.append(f"{key} = {texts[0]}")
        else:
            lines.append(f"{key} = {'[' + ', '.join(texts) + ']' if kind is Kind.COUNTS else json.dumps(texts[0])}")
    return "\n".join(lines)


def load(
    folder: Path, by: str, words: Mapping[str, list[str]], beside: Mapping[str, list[str]]
) -> Loaded[ServerConfig]:
    """Give `words` by one source, and `beside` by another."""
    if by == "flag":
        return load_config(ServerConfig, as_flags(words), None, as_environment(beside))
    if by == "environment":
        return load_config(ServerConfig, as_flags(beside), None, as_environment(words))
    file = folder / "kv.toml"
    file.write_text(as_toml(words))
    return load_config(ServerConfig, as_flags(beside), file, {})


def test_there_is_a_case_for_each_field() -> None:
    assert set(CASES) == set(SETTINGS)


@pytest.mark.parametrize("by", ["flag", "environment", "file"])
@pytest.mark.parametrize("field", CASES)
def test_each_key_works_from_each_source(tmp_path: Path, field: str, by: str) -> None:
    words, expected = CASES[field]
    loaded = load(tmp_path, by, {field: words}, given_beside(field))
    assert getattr(loaded.config, field) == expected
    assert loaded.sources[field].startswith(by)
    others = set(SETTINGS) - {field} - set(given_beside(field))
    default = ServerConfig(socket_path="s")
    assert all(getattr(loaded.config, other) == getattr(default, other) for other in others)
    assert all(loaded.sources[other] == "default" for other in others)


@pytest.mark.parametrize("field", [field for field in CASES if SETTINGS[field].kind is not Kind.SWITCH])
def test_each_flag_is_there(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in as_environment({field: [] for field in SETTINGS}):
        monkeypatch.delenv(name, raising=False)
    words = {field: CASES[field][0], **given_beside(field)}
    arguments = [part for name, texts in words.items() for text in texts for part in (f"--{SETTINGS[name].name}", text)]
    done = CliRunner().invoke(cli.app, ["serve", "--print-config", *arguments])
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith(f"{SETTINGS[field].key} =")]
    assert line.endswith(f"# flag --{SETTINGS[field].name}")


@pytest.mark.parametrize(("flag", "expected"), [("--verify-memory", "true"), ("--no-verify-memory", "false")])
def test_a_switch_has_two_flags(flag: str, expected: str) -> None:
    done = CliRunner().invoke(cli.app, ["serve", "--print-config", "--socket", "s", flag])
    assert f"verify_memory = {expected}" in done.output


def test_flags_go_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('socket = "f"\nmemory = "1MiB"\nmax_sessions = 1\nstall_s = 7\n')
    environ = {"KVFERRY_MEMORY": "2MiB", "KVFERRY_MAX_SESSIONS": "2", "KVFERRY_CONFIG": str(file)}
    loaded = load_config(ServerConfig, {"max_sessions": "3"}, None, environ)
    config = loaded.config
    assert (config.socket_path, config.stall_s, config.memory_bytes, config.max_sessions) == ("f", 7.0, 2 << 20, 3)
    assert [loaded.sources[field] for field in ("stall_s", "memory_bytes", "max_sessions", "device")] == [
        f"file {file}, key stall_s",
        "environment KVFERRY_MEMORY",
        "flag --max-sessions",
        "default",
    ]


@pytest.mark.parametrize("text", ["", "nonsense\x01", "-1", "1e999"])
@pytest.mark.parametrize(
    ("field", "by"),
    [
        (field, by)
        for field in CASES
        for by in ("flag", "environment", "file")
        if SETTINGS[field].kind is not Kind.TEXT and (SETTINGS[field].kind is not Kind.SWITCH or by != "flag")
    ],
)
def test_empty_and_malformed_values_are_one_line_with_key_source_and_what_is_allowed(
    tmp_path: Path, field: str, text: str, by: str
) -> None:
    setting = SETTINGS[field]
    file = tmp_path / "kv.toml"
    file.write_text(f"{setting.key} = {json.dumps(text)}")
    flags: dict[str, Any] = {field: [text] if setting.kind.repeated else text} if by == "flag" else {}
    with pytest.raises(ValueError) as caught:
        load_config(
            ServerConfig,
            {"socket_path": "s", **flags},
            file if by == "file" else None,
            {setting.env: text} if by == "environment" else {},
        )
    where = {"flag": f"flag --{setting.name}", "environment": f"environment {setting.env}", "file": f"file {file}"}[by]
    message = str(caught.value)
    assert message.startswith(f"{setting.name} ({where}")
    assert setting.allowed in message
    assert "\n" not in message


@pytest.mark.parametrize("field", [field for field in CASES if SETTINGS[field].kind is Kind.TEXT])
def test_an_empty_word_is_no_value(field: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_config(
            ServerConfig, {} if field == "socket_path" else {"socket_path": "s"}, None, {SETTINGS[field].env: ""}
        )
    assert str(caught.value).startswith(f"{SETTINGS[field].name} (environment {SETTINGS[field].env}) is ''")


@pytest.mark.parametrize(
    ("toml", "nearest"),
    [("max_sesions = 5", "max_sessions"), ("memory_bytes = 5", "memory"), ("[remote_options]\na = 5", "remote_option")],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, toml: str, nearest: str) -> None:
    file = tmp_path / "kv.toml"
    file.write_text(toml)
    with pytest.raises(ValueError, match=f"unknown key .* nearest known one is {nearest}"):
        load_config(ServerConfig, {"socket_path": "s"}, file, {})


def test_an_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'KVFERRY_MEMROY' \(the nearest known one is KVFERRY_MEMORY\)"):
        load_config(ServerConfig, {"socket_path": "s"}, None, {"KVFERRY_MEMROY": "4GiB"})


@pytest.mark.parametrize(
    "name", ["KVFERRY_SERVICE_HOST", "KVFERRY_PORT", "KVFERRY_PORT_9464_TCP_ADDR", "KVFERRY_B_SERVICE_PORT_HTTP"]
)
def test_what_kubernetes_sets_is_not_ours(name: str) -> None:
    load_config(ServerConfig, {"socket_path": "s"}, None, {name: "10.0.0.1", "HOME": "/"})


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"socket = ", "is no TOML"), (b"\xff\xfe", "is no TOML"), (b"socket = 5", "is 5; it must be a path")],
)
def test_a_file_that_is_wrong(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "kv.toml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load_config(ServerConfig, {}, file, {})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none cannot be read: No such file"):
        load_config(ServerConfig, {"socket_path": "s"}, tmp_path / "none", {})


def test_a_path_of_the_file_that_is_empty_is_told() -> None:
    with pytest.raises(ValueError, match="KVFERRY_CONFIG is empty; it must be the path"):
        load_config(ServerConfig, {"socket_path": "s"}, None, {"KVFERRY_CONFIG": ""})


def test_a_value_that_is_hidden_by_another_source_has_to_be_right_too() -> None:
    with pytest.raises(ValueError, match="environment KVFERRY_MEMORY"):
        load_config(ServerConfig, {"socket_path": "s", "memory_bytes": "1GiB"}, None, {"KVFERRY_MEMORY": "lots"})


def test_what_has_to_be_set_and_is_not_is_told_with_all_its_names() -> None:
    with pytest.raises(ValueError, match="give --socket, KVFERRY_SOCKET, or socket in the file"):
        load_config(ServerConfig, {}, None, {})


def test_the_printed_configuration_is_a_file_that_means_the_same(tmp_path: Path) -> None:
    words = {field: case[0] for field, case in CASES.items() if field != "remote_options"}
    loaded = load_config(ServerConfig, as_flags(words), None, {})
    file = tmp_path / "kv.toml"
    file.write_text(view_config(loaded))
    assert load_config(ServerConfig, {}, file, {}).config == loaded.config


def test_secrets_are_not_printed() -> None:
    words = {"socket_path": ["s"], "remote_url": ["s3://b"], "remote_options": ["secret_access_key=hunter2"]}
    text = view_config(load_config(ServerConfig, as_flags(words), None, {}))
    assert "hunter2" not in text
    assert 'remote_option = { "secret_access_key" = "***" }' in text
    with pytest.raises(ValueError) as caught:
        load_config(ServerConfig, {"socket_path": "s", "remote_options": ["hunter2"]}, None, {})
    assert "hunter2" not in str(caught.value)


def test_the_command_prints_it_and_ends(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('socket = "s"\nmemory = "8GiB"')
    command = [sys.executable, "-m", "kvferry", "serve", "--config", str(file), "--print-config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert 'memory = "8GiB"' in done.stdout
    assert f"# file {file}, key memory" in done.stdout


def test_a_python_without_tomllib_reads_files_by_tomli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.10; here tomli, which is the same code under another name, may not be installed."""
    asked: list[str] = []

    class Tomli(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(vars(config_sources)["tomllib"], name)

    monkeypatch.setitem(sys.modules, "tomli", Tomli("tomli"))
    monkeypatch.setattr(sys, "version_info", (3, 10, 0, "final", 0))
    spec = importlib.util.find_spec(config_sources.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look for it there
    spec.loader.exec_module(module)
    file = tmp_path / "kv.toml"
    file.write_text('socket = "s"\nmemory = "1MiB"\n')
    assert module.load_config(ServerConfig, {}, file, {}).config.memory_bytes == 1 << 20
    assert "loads" in asked
    file.write_text("socket =")
    with pytest.raises(ValueError, match="is no TOML"):
        module.load_config(ServerConfig, {}, file, {})
    assert "TOMLDecodeError" in asked
