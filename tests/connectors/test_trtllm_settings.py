"""Settings of TensorRT-LLM's connector, out of the environment and a file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.connectors.trtllm.settings import PREFIX, read_settings

ARGS = SimpleNamespace(kv_connector_config=SimpleNamespace())
URL = {PREFIX + "URL": "unix:///run/kv.sock"}


def test_variables_are_text() -> None:
    settings = read_settings(
        ARGS, {**URL, PREFIX + "ISOLATED_IPC": "true", PREFIX + "LOAD_TIMEOUT_S": "2.5", "PATH": "/bin"}
    )
    assert (settings.url, settings.isolated_ipc, settings.load_timeout_s) == ("unix:///run/kv.sock", True, 2.5)
    assert (settings.model_id, settings.disk_wait_s, settings.token()) == ("", 0.0, None)


def test_variables_go_before_the_file_and_that_before_tensorrt_llm(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('url = "unix:///file"\nmodel_id = "m"\ndisk_wait_s = 1\n')
    args = SimpleNamespace(kv_connector_config=SimpleNamespace(server_url="unix:///server"))
    named = {PREFIX + "CONFIG": str(file)}
    assert read_settings(args, {}).url == "unix:///server"
    found = read_settings(args, named)
    assert (found.url, found.model_id, found.disk_wait_s) == ("unix:///file", "m", 1.0)
    assert read_settings(args, {**named, **URL}).url == "unix:///run/kv.sock"


def test_a_token_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a:secret\n")
    assert read_settings(ARGS, {**URL, PREFIX + "TOKEN_FILE": str(file)}).token() == "a:secret"
    with pytest.raises(ValueError, match="token_file of KVferry"):
        read_settings(ARGS, {**URL, PREFIX + "TOKEN_FILE": str(tmp_path / "none")}).token()


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, "set KVFERRY_TRTLLM_URL"),
        ({**URL, PREFIX + "MODELID": "m"}, "did you mean 'model_id'"),
        ({**URL, PREFIX + "ZZZ": "m"}, "'zzz', which KVferry's connector does not know. Known are: url, model_id"),
        ({**URL, PREFIX + "LOAD_TIMEOUT_S": "0"}, "> 0"),
        ({**URL, PREFIX + "DISK_WAIT_S": "long"}, "float"),
        ({**URL, PREFIX + "CONFIG": "/nowhere.toml"}, "No such file"),
    ],
)
def test_mistakes_are_named(environment: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_settings(ARGS, environment)


@pytest.mark.parametrize(
    ("content", "text"), [("url = ", "kv.toml: Invalid"), ("urrl = 1\n", "did you mean 'url'"), ("url = 1\n", "str")]
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "kv.toml"
    file.write_text(content)
    with pytest.raises(ValueError, match=text):
        read_settings(ARGS, {PREFIX + "CONFIG": str(file)})
