"""The page says what there is, and what it shows to paste is accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.connectors.vllm.counters import P2P_COUNTERS
from kvferry.connectors.vllm.p2p.settings import P2pSettings

PAGE = (Path(__file__).parents[2] / "docs" / "vllm-p2p.md").read_text(encoding="utf-8")
EXAMPLES = [json.loads(found) for found in re.findall(r"--kv-transfer-config '(\{.*?\n\})'", PAGE, re.DOTALL)]
TABLE = PAGE.partition("## Settings")[2].partition("##")[0]


@pytest.mark.parametrize("name", P2pSettings.__struct_fields__)
def test_every_setting_is_in_the_table(name: str) -> None:
    assert re.search(rf"^\| [^|]*`{name}`", TABLE, re.MULTILINE)


@pytest.mark.parametrize("name", P2P_COUNTERS)
def test_every_counter_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("config", EXAMPLES)
def test_what_there_is_to_paste(config: dict[str, object]) -> None:
    assert config["kv_load_failure_policy"] == "recompute"
    settings = P2pSettings.of(SimpleNamespace(**config))
    assert settings.proxy == "127.0.0.1:30001"
    assert settings.kv_port == config["kv_port"]


def test_both_sides_are_there_to_paste() -> None:
    assert [config["kv_role"] for config in EXAMPLES] == ["kv_producer", "kv_consumer"]
