"""Packages that SGLang imports and a CPU has no use of: empty stand-ins, in every process of the environment.

`scripts/lib/sglang.sh` copies this file into the environment, with a `.pth` file that imports it when Python starts.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

STOOD_IN_FOR = ("triton", "torchvision", "sgl_kernel")
VERSION = "0.28.0"


class InterpolationMode(enum.Enum):
    """transformers makes tables of its members when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Anything:
    """What any name of a stand-in is: a decorator, a base class's stand-in, a namespace; never of use."""

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "active":  # triton.runtime.driver.active: there is no GPU
            raise AttributeError(name)
        return self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)


class _Made:
    """The base of classes of a stand-in, which others derive from, or ask whether something is one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found: Any = type(name, (_Made,), {}) if name.lstrip("_")[:1].isupper() else _Anything()
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in STOOD_IN_FOR:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__dict__.update(__version__=VERSION, InterpolationMode=InterpolationMode, __path__=[])
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
