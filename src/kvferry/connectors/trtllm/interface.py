"""Where the connector touches TensorRT-LLM, and where its releases differ. Imported here only; it may be absent."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from kvferry.ipc import process_table

# Since 1.4's pre-releases, and before.
_MODULES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


def base_class(name: str) -> Any:
    """TensorRT-LLM's abstract class of that name; `object` where it is not installed, or has no connectors."""
    for module in _MODULES:
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError:
            continue
    return object


def release() -> str:
    """The release as far as it decides how KV is laid out: "1.2"; "" where TensorRT-LLM is not installed."""
    try:
        version = str(importlib.import_module("tensorrt_llm").__version__)
    except ImportError:
        return ""
    return ".".join(version.split(".")[:2])


def rank_and_size() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    mpi = _mpi()
    return (0, 1) if mpi is None else (int(mpi.mpi_rank()), int(mpi.mpi_world_size()))


def own_engine_id(llm_args: Any) -> str:
    """A name for the engine whose rank 0 is in this process, which gives both sides the same `llm_args`."""
    return f"trtllm-{process_table().token.hex()}-{id(llm_args):x}"


def shared_engine_id(llm_args: Any, size: int) -> str:
    """Rank 0's `own_engine_id`, on every rank. All ranks have to call it, at the same point."""
    own, mpi = own_engine_id(llm_args), _mpi()
    return own if mpi is None or size == 1 else str(mpi.mpi_broadcast(own, root=0))


def stream_handle(stream: Any) -> int | None:
    """The driver's handle of a torch stream; None for what is none, as without a GPU."""
    return getattr(stream, "cuda_stream", None)


def current_stream() -> int | None:
    """The handle of the stream on which torch works now; None where it has no GPU in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.current_stream().cuda_stream


def _mpi() -> Any:
    try:
        return importlib.import_module("tensorrt_llm._utils")
    except ImportError:
        return None
