"""The name under which engines share KV: all that decides what the bytes are, beside tokens and layout.

SGLang's page hashes stand for tokens (from 0.5.20 on also for LoRA and salt) and for nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.connectors.weights import weights_name, weights_or_own

# What SGLang was told that decides what KV is. One that a release has not is empty there.
_DECISIVE = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "rl_quant_profile",
    "torchao_config",
    "model_impl",
    "model_config_parser",
    "model_loader_extra_config",
    "custom_weight_loader",
    "decrypted_config_file",
    "json_model_override_args",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "context_length",
)
_LOG = logging.getLogger("sglang.kvferry")


@dataclass(frozen=True)
class RankIdentity:
    """Which part of a model's KV a rank has. `shared` by all tensor-parallel ranks: each has the same (MLA)."""

    tp_rank: int
    tp_size: int
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    shared: bool = False

    def __str__(self) -> str:
        tensor = "all" if self.shared else f"{self.tp_rank}/{self.tp_size}"
        return f"tp {tensor} pp {self.pp_rank}/{self.pp_size} cp {self.cp_rank}/{self.cp_size}"

    @property
    def writes(self) -> bool:
        """Whether this rank's KV is to be stored: of the same one copy is enough."""
        return not self.shared or self.tp_rank == 0


def model_name(
    server_args: Any, rank: RankIdentity, *, model_id: str, release: str, engine_id: str, layers: str = ""
) -> str:
    """The `model` of a registration: a readable part, and a hash of everything that counts.

    `model_id`, where it is not empty, stands for the weights. Where nothing says what they are the name is this
    engine's own. `layers` says which the rank has.
    """
    model = str(getattr(server_args, "model_path", ""))
    parts = {name: str(getattr(server_args, name, None)) for name in _DECISIVE}
    parts |= {
        "weights": f"id:{model_id}" if model_id else _weights(server_args, model, engine_id),
        "adapters": json.dumps(_adapters(server_args, engine_id)),
        "scales": _content(str(getattr(server_args, "quantization_param_path", None) or "")),
        "rank": str(rank),
        "layers": layers,
        "engine": release,
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    short = (model_id or model).rstrip("/").rsplit("/", 1)[-1]
    return f"sglang/{short[:64]}/{digest}"


def _weights(server_args: Any, model: str, engine_id: str) -> str:
    revision, load_format = (str(getattr(server_args, name, None) or "") for name in ("revision", "load_format"))
    return weights_or_own(
        model, revision, load_format, engine_id=engine_id, log=_LOG, setting="model_id in KVferry's extra config"
    )


def _adapters(server_args: Any, engine_id: str) -> list[str]:
    """What the LoRA adapters are that were given at the start: SGLang's page hashes know their names and paths only.

    Those that are loaded later have ids there that no other engine has.
    """
    given = getattr(server_args, "lora_paths", None) or []
    paths = given.values() if isinstance(given, Mapping) else map(_path_of, given)
    return sorted(_adapter(str(path), engine_id) for path in paths)


def _path_of(adapter: Any) -> str:
    """As SGLang takes them: a reference, a dictionary, NAME=PATH, or a path."""
    if isinstance(adapter, str):
        return adapter.partition("=")[2] or adapter
    return str(adapter["lora_path"] if isinstance(adapter, Mapping) else adapter.lora_path)


def _adapter(path: str, engine_id: str) -> str:
    name = weights_name(path, "")
    if name is not None:
        return name
    _LOG.warning("nothing on this host says what the LoRA adapter %s is, so this engine shares KV with no other", path)
    return f"of engine:{engine_id}"


def _content(path: str) -> str:
    """What a file says; its name where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
    except OSError:
        return path
