"""KVferry's connectors for SGLang.

`KVFerryStorage` is a storage back end of HiCache: it keeps pages of SGLang's host pool. `KVFerryLinker` is an external
linker: the cache server reads and fills the KV cache on the device. SGLang itself is imported with the classes, on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.connectors.sglang.linker import KVFerryLinker as KVFerryLinker
    from kvferry.connectors.sglang.storage import KVFerryStorage as KVFerryStorage

_HOMES = {
    "KVFerryLinker": "kvferry.connectors.sglang.linker",
    "KVFerryStorage": "kvferry.connectors.sglang.storage",
}

__all__ = ["KVFerryLinker", "KVFerryStorage"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
