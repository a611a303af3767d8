"""Settings: all by name, wrong ones refused with what is right."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connectors.vllm.settings import ConnectorSettings


def test_defaults() -> None:
    settings = ConnectorSettings.from_extra_config({"url": "unix:///run/kvferry.sock"})
    assert settings == ConnectorSettings(url="unix:///run/kvferry.sock")
    assert settings.load_timeout_s == 10


def test_every_setting_can_be_given() -> None:
    extra: dict[str, Any] = {
        "url": "/s",
        "model_id": "m",
        "store_generated": True,
        "isolated_ipc": True,
        "disk_wait_s": 0,
        "load_timeout_s": 3,
        "token_file": "/t",
    }
    assert set(extra) == set(ConnectorSettings.__struct_fields__)
    settings = ConnectorSettings.from_extra_config(extra)
    assert {name: getattr(settings, name) for name in extra} == extra


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "kvferry serve"),
        ({"url": "/s", "model_idd": "x"}, "did you mean 'model_id'"),
        ({"url": "/s", "zzz": 1}, "does not know. Known are: url"),
        ({"url": 3}, "Expected `str`"),
        ({"url": "/s", "load_timeout_s": 0}, "load_timeout_s"),
        ({"url": "/s", "store_generated": "yes"}, "store_generated"),
    ],
)
def test_mistakes_are_named(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        ConnectorSettings.from_extra_config(extra)
    assert text in str(caught.value)
