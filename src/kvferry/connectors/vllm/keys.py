"""What, beside its tokens, decides a request's KV, and whether keys can express it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.layout import KeyContext

LoraIdentity = Callable[[int, str, str, str], str]


class NotExpressible(Exception):
    """The KV of this request depends on something that no key names, so it is neither stored nor reused."""


def context_of(request: Any, *, epoch: str, lora_identity: LoraIdentity) -> KeyContext:
    """The context of a vLLM request's keys.

    `epoch` keeps apart what was computed before and after the engine's cache was reset (its weights may be others).
    `lora_identity(number, name, path, base)` names an adapter's weights, once for each number that vLLM gave it. Raises
    NotExpressible.
    """
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        raise NotExpressible("prompt embeddings")
    adapter = _adapter(request.lora_request, lora_identity)
    return KeyContext(lora=adapter, salt=_salt(request, epoch), multimodal=_multimodal(request))


def _adapter(lora: Any, lora_identity: LoraIdentity) -> str:
    if lora is None:
        return ""
    if getattr(lora, "load_inplace", False):
        raise NotExpressible("a LoRA adapter that is reloaded in place")
    base = getattr(lora, "base_model_name", None) or ""
    return lora_identity(lora.lora_int_id, lora.lora_name, lora.lora_path, base)


def _salt(request: Any, epoch: str) -> str:
    salt = request.cache_salt or ""
    return f"{epoch}/{salt}" if epoch else salt  # an epoch is random: no salt can be meant to look like one


def _multimodal(request: Any) -> tuple[str, ...]:
    """Each input's hash and place: the same picture elsewhere in the prompt is other KV."""
    found = []
    for feature in request.mm_features or ():
        if not feature.identifier:
            raise NotExpressible("a multimodal input without a hash")
        place = feature.mm_position
        found.append(f"{feature.identifier}@{place.offset}+{place.length}")
    return tuple(found)
