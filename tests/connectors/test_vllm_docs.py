"""The page and the examples say what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.connectors.vllm.counters import COUNTERS
from kvferry.connectors.vllm.settings import ConnectorSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples" / "vllm").iterdir())


@pytest.mark.parametrize("name", ConnectorSettings.__struct_fields__)
def test_every_setting_is_in_the_table(name: str) -> None:
    assert f"| `{name}` |" in PAGE


@pytest.mark.parametrize("name", COUNTERS)
def test_every_counter_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE or f"`vllm:kvferry_{name}_total`" in PAGE


@pytest.mark.parametrize("text", [PAGE, *(path.read_text(encoding="utf-8") for path in EXAMPLES if path.is_file())])
def test_a_configuration_never_leaves_the_failure_policy_to_vllm(text: str) -> None:
    if '"kv_connector":' in text:
        assert '"kv_load_failure_policy": "recompute"' in text
