"""What a client asks for, and what of it goes to which engine. Pure.

Bodies stay what they are but for the few fields that say how prefill and decode share the work. What a client says of
those itself is dropped: it would let it have engines connect to wherever it likes.
"""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.router.handover import Handover
from kvferry.router.prefixes import Prefix, cut_prefix

__all__ = ["Ask", "BadRequestError", "decode_body", "prefill_body", "read_ask"]

_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
# What an engine refuses, or does for nothing, in a request for one token that is not streamed.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "logprobs", "top_logprobs")
# What decides a prompt's KV beside the prompt, or is put before it.
_SEEDS = ("model", "cache_salt", "tools", "chat_template", "chat_template_kwargs", "mm_processor_kwargs")


class BadRequestError(Exception):
    """The client's mistake; `param` is the field that is wrong."""

    def __init__(self, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.param = param


@dataclass(frozen=True)
class Ask:
    """One request: its fields, and how its prompt begins.

    `wants_prompt`: the answer has something of every token of the prompt, which only an engine that computes all of it
    can give; or the prompt is of embeddings, which connectors do not hand over.
    """

    fields: dict[str, Any]
    is_chat: bool
    prefix: Prefix

    @property
    def stream(self) -> bool:
        return self.fields.get("stream") is True

    @property
    def wants_prompt(self) -> bool:
        fields = self.fields
        echoes = bool(fields.get("echo")) and fields.get("logprobs") is not None
        return echoes or fields.get("prompt_logprobs") is not None or bool(fields.get("prompt_embeds"))


def read_ask(body: bytes, *, is_chat: bool) -> Ask:
    """Raises BadRequestError where it is no request, or one that would have several answers."""
    try:
        return _ask(body, is_chat)
    except RecursionError:
        raise BadRequestError("the body is no JSON that can be read: it is nested too deeply") from None


def prefill_body(ask: Ask, handover: Handover) -> bytes:
    """The request for a prompt's KV alone."""
    fields = {name: value for name, value in ask.fields.items() if name not in _NOT_FOR_PREFILL}
    fields |= {"max_tokens": 1, "stream": False}
    if ask.is_chat or "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    return _with_params(fields, handover.to_prefill)


def decode_body(ask: Ask, handover: Handover | None) -> bytes:
    """The request for the answer; without a handover the engine computes the prompt itself."""
    return _with_params(ask.fields, None if handover is None else handover.to_decode)


def _ask(body: bytes, is_chat: bool) -> Ask:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequestError(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequestError("the body is no JSON object")
    fields.pop("request_id", None)
    more = fields.get("vllm_xargs")  # where vLLM finds the same
    for name in _TRANSFERS:
        fields.pop(name, None)
        if isinstance(more, dict):
            more.pop(name, None)
    for name in ("n", "best_of"):
        if fields.get(name) not in (None, 1):
            raise BadRequestError(f"{name} must be 1: prefill and decode share one answer a request", name)
    if fields.get("use_beam_search"):
        raise BadRequestError("use_beam_search is not possible: prefill and decode share one answer a request")
    content = _chat_content(fields) if is_chat else _prompt_content(fields)
    seed = _canonical([is_chat, *(fields.get(name) for name in _SEEDS)])
    return Ask(fields, is_chat, cut_prefix(seed, content))


def _with_params(fields: dict[str, Any], params: dict[str, Any] | None) -> bytes:
    return msgspec.json.encode(fields if params is None else {**fields, "kv_transfer_params": params})


def _prompt_content(fields: dict[str, Any]) -> bytes:
    prompt, embeds = fields.get("prompt"), fields.get("prompt_embeds")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise BadRequestError(
                "several prompts in one request are not possible: send one request for each", "prompt"
            )
        prompt = prompt[0]
    if (isinstance(embeds, list) and len(embeds) > 1) or (embeds and prompt):
        raise BadRequestError(
            "several prompts in one request are not possible: send one request for each", "prompt_embeds"
        )
    if isinstance(prompt, str):
        return prompt.encode()
    if isinstance(prompt, list):
        try:
            return array.array("i", prompt).tobytes()
        except (TypeError, OverflowError):
            pass  # no token ids, as the engine will say
    return _canonical([prompt, embeds])


def _chat_content(fields: dict[str, Any]) -> bytes:
    messages = fields.get("messages")
    if isinstance(messages, list) and any(isinstance(message, list) for message in messages):
        raise BadRequestError("several conversations in one request are not possible: send one for each", "messages")
    return b"".join(_canonical(message) for message in messages) if isinstance(messages, list) else _canonical(messages)


def _canonical(value: object) -> bytes:
    return msgspec.json.encode(value, order="deterministic")
