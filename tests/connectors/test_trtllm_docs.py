"""The page says what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from doubles import trt_mutants
from kvferry.connectors import trtllm
from kvferry.connectors.trtllm.settings import ConnectorSettings

PAGE = (Path(__file__).parents[2] / "docs" / "tensorrt-llm.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ConnectorSettings.__struct_fields__)
def test_every_setting_is_in_the_table(name: str) -> None:
    assert f"| `{name.upper()}` | `{name}` |" in PAGE


@pytest.mark.parametrize("name", trtllm.__all__)
def test_what_is_to_be_pasted_exists(name: str) -> None:
    assert f'"{name}"' in PAGE
    assert f": {name}\n" in PAGE
    assert getattr(trtllm, name).__name__ == name


def test_the_page_says_what_was_not_run() -> None:
    assert "**The engine itself was not run.**" in PAGE
    assert trtllm.__name__ in PAGE
    assert Path(trt_mutants.__file__).name in PAGE
