"""The page says what there is, and what it has to paste is taken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.connectors.sglang.settings import HICACHE_KEYS, SGLangSettings

PAGE = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text(encoding="utf-8")


def pasted() -> list[dict[str, Any]]:
    """The JSON of each command line."""
    return [json.loads(found) for found in re.findall(r"'(\{.*?\})'", PAGE, re.DOTALL)]


def shown(value: object) -> str:
    """A default as the table has it."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("field", msgspec.structs.fields(SGLangSettings), ids=lambda field: field.name)
def test_every_setting_is_in_the_table_with_its_default(field: msgspec.structs.FieldInfo) -> None:
    (row,) = re.findall(rf"^\| `{field.name}` \| (.*?) ?\|", PAGE, re.MULTILINE)
    assert row == ("" if field.required else shown(field.default))


def test_what_is_to_be_pasted_is_taken() -> None:
    storage, linker = pasted()
    assert SGLangSettings.from_extra_config(storage, where="here", foreign=HICACHE_KEYS).url.startswith("unix://")
    assert SGLangSettings.from_extra_config(linker["linker_extra_config"], where="here").url.startswith("unix://")
    assert (storage["class_name"], linker["linker"]) == ("KVFerryStorage", "KVFerryLinker")
    assert storage["interface_v1"] == 1
    assert {storage["module_path"], linker["linker_module_path"]} == {"kvferry.connectors.sglang"}
