"""The name under which engines share KV: all that decides what the bytes are, beside tokens, layout and rank."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from kvferry.connectors.vllm.keys import NotExpressible
from kvferry.connectors.weights import weights_name

# Fields of a model's configuration that differ between copies and releases, and mean nothing for KV.
_NOT_MODEL = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "name_or_path"})
# RoPE variants whose angles depend on the longest sequence that the engine is set up for.
_LENGTH_DEPENDENT = ("longrope", "dynamic", '"su"')
_LOG = logging.getLogger("vllm.kvferry")


def model_name(vllm_config: Any, *, model_id: str, engine: str) -> str:
    """The `model` of a registration: a readable part, and a hash of everything that counts.

    `engine` names what packs the blocks: vLLM's version and its attention backends. `model_id`, where it is not empty,
    stands for the weights.
    """
    model, config = vllm_config.model_config, _config_text(vllm_config.model_config)
    parts = {
        "weights": f"id:{model_id}" if model_id else _weights(vllm_config),
        "config": hashlib.sha256(config.encode()).hexdigest(),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "engine": engine,
        "draft": _draft(vllm_config),
    }
    if any(kind in config for kind in _LENGTH_DEPENDENT):
        parts["max_model_len"] = str(model.max_model_len)
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    short = (model_id or str(model.model)).rstrip("/").rsplit("/", 1)[-1]
    return f"vllm/{short[:64]}/{digest}"


def lora_name(number: int, name: str, path: str, base: str) -> str:
    """What an adapter's weights are; its name alone may come to mean another adapter.

    `number` is vLLM's, which is another after the adapter was loaded anew; it is not part of the name. Raises
    NotExpressible where nothing here says what they are.
    """
    weights = weights_name(path, "")
    if weights is None:
        raise NotExpressible("a LoRA adapter whose files are not found on this host")
    return f"{name}/{base}/{weights}"


def _weights(vllm_config: Any) -> str:
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format).endswith("dummy"):
        return f"dummy:{model.model}@{model.seed}"
    return _known(weights_name(model.model, model.revision or ""), model.model, vllm_config)


def _known(name: str | None, model: str, vllm_config: Any) -> str:
    """The name; where there is none, one that no other engine has."""
    if name is not None:
        return name
    _LOG.warning(
        "nothing on this host says what the weights of %s are, so this engine shares KV with no other. If they never "
        "change under that name, set model_id in kv_connector_extra_config.",
        model,
    )
    return f"of engine:{vllm_config.kv_transfer_config.engine_id}"


def _config_text(model: Any) -> str:
    found = {key: value for key, value in model.hf_config.to_dict().items() if key not in _NOT_MODEL}
    return json.dumps(found, sort_keys=True, default=str)


def _draft(vllm_config: Any) -> str:
    """A draft model's layers have KV in the same blocks."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return ""
    weights = weights_name(draft.model, draft.revision or "")
    return f"{getattr(speculative, 'method', '')}:{_known(weights, draft.model, vllm_config)}"
