"""What is asked of SGLang's own modules, which have other places in other releases."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Where a scheduler's arguments are: the newest first.
_ARGUMENTS = (
    ("sglang.srt.runtime_context", "get_server_args"),
    ("sglang.srt.server_args", "get_global_server_args"),
)


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
