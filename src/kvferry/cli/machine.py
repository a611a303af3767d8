"""What this machine is and has."""

from __future__ import annotations

import os
import platform

import torch

import kvferry
from kvferry.cuda.driver import load_driver
from kvferry.errors import CudaUnavailableError
from kvferry.ipc import IPCPolicy

__all__ = ["describe_machine", "resolve_device", "wrapper_kind"]


def resolve_device(wanted: str) -> str:
    """`cpu` or `cuda`, from `auto`, `cpu` or `cuda`.

    Raises `CudaUnavailableError` where `cuda` is wanted and torch cannot use it, `ValueError` for another word.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {wanted!r}: it must be auto, cpu or cuda")
    if wanted == "cpu":
        return "cpu"
    usable = torch.version.cuda is not None and torch.cuda.is_available() and load_driver() is not None
    if wanted == "cuda" and not usable:
        raise CudaUnavailableError("no GPU that this torch can use; --device cpu runs on host memory")
    return "cuda" if usable else "cpu"


def wrapper_kind(device: str) -> str:
    """The wrapper that memory of `device`, allocated as an engine does, is shared by: `host`, `raw`, `vmm`, ..."""
    wrapper = IPCPolicy().choose(torch.zeros(1, device=device))
    return str(wrapper.descriptor_type.__struct_config__.tag)


def describe_machine(device: str) -> dict[str, str | int]:
    """The facts that a measured figure depends on."""
    facts: dict[str, str | int] = {
        "kvferry": kvferry.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "backend": "cuda" if device == "cuda" else "host",
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(0)
        facts["gpus"] = torch.cuda.device_count()
        facts["cuda"] = str(torch.version.cuda)
    return facts


def _cpu_name() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
