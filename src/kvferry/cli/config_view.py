"""The configuration in effect, for people, in the form of a file."""

from __future__ import annotations

from kvferry.cli.config_sources import Loaded
from kvferry.cli.config_values import show_value
from kvferry.config import server_settings

__all__ = ["view_config"]


def view_config(loaded: Loaded) -> str:
    """A line a setting: key, value and, as a comment, where it comes from. Secrets are hidden."""
    lines = []
    for field, setting in server_settings().items():
        value = getattr(loaded.config, field)
        text = f"# {setting.key} =" if value is None else f"{setting.key} = {show_value(setting, value)}"
        lines.append((text, loaded.sources[field]))
    width = min(48, max(len(text) for text, _ in lines))
    return "\n".join(f"{text:{width}}  # {source}" for text, source in lines)
