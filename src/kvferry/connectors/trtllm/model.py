"""What the model's own configuration says of its KV: the interface does not tell, and a pool's shape alone does not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.connectors.weights import model_folder
from kvferry.errors import LayoutError

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "hidden": ("hidden_size", "n_embd"),
}
# Inputs other than tokens, of which a connector is not told reliably; layers that have states in place of KV.
_FOREIGN_INPUTS = (
    "vision_config",
    "audio_config",
    "speech_config",
    "vision_tower",
    "mm_projector_type",
    "is_encoder_decoder",
)
_STATES = ("ssm_cfg", "mamba_d_state", "hybrid_override_pattern", "layers_block_type", "linear_attn_config")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """KV of a whole model, not of one rank. Latent attention has one head, and keys only."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    is_latent: bool

    def heads_of_rank(self, tensor_parallel_size: int) -> int:
        """KV heads in each rank's pool; where there are more ranks than heads, each has a copy of one."""
        return -(-self.num_kv_heads // tensor_parallel_size)

    @property
    def kv_factor(self) -> int:
        """Tensors a layer: keys and values, or one of both."""
        return 1 if self.is_latent else 2


def read_config(model: str, revision: str) -> dict[str, Any]:
    """The model's config.json. Raises LayoutError where it is not found on this host."""
    folder = model_folder(model, revision)
    try:
        if folder is None:
            raise FileNotFoundError(f"{model} is neither a folder nor in this host's Hugging Face cache")
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LayoutError(
            f"the pool cannot be checked against the model's config.json: {error}; give LLM(model=...) a folder that "
            "has it"
        ) from None
    if not isinstance(found, dict):
        raise LayoutError(f"{folder}/config.json is no JSON object")
    return found


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json tells. Raises LayoutError for models whose KV a prefix of tokens does not decide."""
    for name in _FOREIGN_INPUTS:
        if config.get(name):
            raise LayoutError(f"the model has {name}: inputs that are no tokens are not in any key; not supported")
    for name in _STATES:
        if config.get(name):
            raise LayoutError(f"the model has {name}: layers with states cannot be restored from KV of a prefix")
    layers = _number(config, *_NAMES["layers"])
    latent = config.get("kv_lora_rank")
    if latent:
        return ModelShape(layers, 1, _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim"), True)
    heads = _number(config, *_NAMES["heads"])
    kv_heads = _number(config, "num_key_value_heads", "multi_query_group_num", "num_kv_heads", default=heads)
    hidden = _number(config, *_NAMES["hidden"], default=0)
    head_dim = _number(config, "head_dim", default=hidden // heads or None)
    return ModelShape(layers, kv_heads, head_dim, False)


def _number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LayoutError(f"the model's {name} is {value!r:.100}; expected one number, the same for all layers")
        return value
    if default is None:
        raise LayoutError(f"the model's config.json has none of {', '.join(names)}, so its KV pool cannot be checked")
    return default
