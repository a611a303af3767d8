"""The name under which engines share KV: all that decides what the bytes are, beside tokens, layout and rank."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from kvferry.connectors.weights import weights_or_own

# Fields of a model's configuration that differ between copies and releases, and mean nothing for KV.
_NOT_MODEL = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "name_or_path"})
# RoPE variants whose angles depend on the longest sequence that the engine is set up for.
_LENGTH_DEPENDENT = ("longrope", "dynamic", '"su"')
_LOG = logging.getLogger("kvferry.trtllm")


def model_name(llm_args: Any, config: Mapping[str, Any], *, model_id: str, release: str, engine_id: str) -> str:
    """The `model` of a registration: a readable part, and a hash of everything that counts.

    `model_id`, where it is not empty, stands for the weights. Where nothing says what they are the name is this
    engine's own.
    """
    text = json.dumps({key: value for key, value in config.items() if key not in _NOT_MODEL}, sort_keys=True)
    model = str(llm_args.model)
    parts = {
        "weights": f"id:{model_id}" if model_id else _weights(llm_args, model, engine_id),
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "dtype": str(getattr(llm_args, "dtype", "")),
        "kv_dtype": str(getattr(llm_args.kv_cache_config, "dtype", "")),
        "quantization": str(getattr(getattr(llm_args, "quant_config", None), "quant_algo", "")),
        "kv_quantization": str(getattr(getattr(llm_args, "quant_config", None), "kv_cache_quant_algo", "")),
        "overrides": json.dumps(getattr(llm_args, "model_kwargs", None), sort_keys=True, default=str),
        "checkpoint_format": str(getattr(llm_args, "checkpoint_format", "")),
        "engine": f"{release}/{getattr(llm_args, 'attn_backend', '')}",
    }
    if any(kind in text for kind in _LENGTH_DEPENDENT):
        parts["max_seq_len"] = str(getattr(llm_args, "max_seq_len", ""))
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    short = (model_id or model).rstrip("/").rsplit("/", 1)[-1]
    return f"trtllm/{short[:64]}/{digest}"


def _weights(llm_args: Any, model: str, engine_id: str) -> str:
    revision, load_format = (str(getattr(llm_args, name, None) or "") for name in ("revision", "load_format"))
    return weights_or_own(
        model, revision, load_format, engine_id=engine_id, log=_LOG, setting="KVFERRY_TRTLLM_MODEL_ID"
    )
