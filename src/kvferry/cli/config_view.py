"""The configuration in effect, for people, in the form of a file."""

from __future__ import annotations

from typing import Any

from kvferry.cli.config_sources import Loaded
from kvferry.cli.config_values import show_value
from kvferry.cli.sizes import exact_bytes
from kvferry.config import ServerConfig
from kvferry.settings import settings_of

__all__ = ["describe", "view_config"]


def describe(config: ServerConfig) -> str:
    """What a server of this configuration has, in a line."""
    parts = [f"{exact_bytes(config.memory_bytes)} of host memory"]
    if config.disk_path is not None and config.disk_bytes is not None:
        parts.append(f"{exact_bytes(config.disk_bytes)} of disk at {config.disk_path}")
    if config.remote_url is not None:
        parts.append(f"objects at {config.remote_url}")
    return f"{', '.join(parts)}, for device {config.device}, at {config.socket_path}"


def view_config(loaded: Loaded[Any]) -> str:
    """A line a setting: key, value and, as a comment, where it comes from. Secrets are hidden."""
    lines = []
    for field, setting in settings_of(type(loaded.config)).items():
        value = getattr(loaded.config, field)
        text = f"# {setting.key} =" if value is None else f"{setting.key} = {show_value(setting, value)}"
        lines.append((text, loaded.sources[field]))
    width = min(48, max(len(text) for text, _ in lines))
    return "\n".join(f"{text:{width}}  # {source}" for text, source in lines)
