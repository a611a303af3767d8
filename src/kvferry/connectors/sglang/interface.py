"""What is asked of SGLang's own modules, which have other places in other releases."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Where a scheduler's arguments are: the newest first.
_ARGUMENTS = (
    ("sglang.srt.runtime_context", "get_server_args"),
    ("sglang.srt.server_args", "get_global_server_args"),
)
_FIRST_NUMBERED, _FIRST_WITH_ADAPTERS = (0, 1, 0), (0, 5, 20)  # what is built without a tag is 0.0.0


def server_args() -> Any:
    """What this engine was started with. Raises RuntimeError where this release of SGLang does not say."""
    for module, name in _ARGUMENTS:
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if found is not None:
            return found()
    raise RuntimeError(
        "this release of SGLang does not tell a storage back end what the engine was started with, so KVferry does not "
        "know what its KV is of; use 0.5.20 or newer"
    )


def release() -> str:
    """Of SGLang."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


def check_release(text: str) -> None:
    """Raise RuntimeError for releases whose page hashes do not tell adapters apart; unknown ones are let through."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if found is not None and _FIRST_NUMBERED <= tuple(map(int, found.groups())) < _FIRST_WITH_ADAPTERS:
        raise RuntimeError(
            f"SGLang {text} keys pages by their tokens alone, so that KV of another LoRA adapter or cache salt would "
            "be taken for a request's own; KVferry needs SGLang 0.5.20 or newer"
        )
