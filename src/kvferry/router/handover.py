"""How two engines come to speak of the same KV: by parameters, or, with a legacy engine, by the request's id. Pure."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.router.addresses import EngineAddress

__all__ = ["Handover", "can_share", "plan_handover", "was_sent"]


@dataclass(frozen=True)
class Handover:
    """What each engine is told; `request_id` goes to both. No params: the id says all."""

    request_id: str
    to_prefill: dict[str, Any] | None
    to_decode: dict[str, Any] | None


def can_share(prefill: EngineAddress, decode: EngineAddress) -> bool:
    """Whether KV can get from one to the other: both take part, and they are not one engine that does both."""
    return bool(prefill.kv and decode.kv) and not set(prefill.kv) & set(decode.kv)


def plan_handover(prefill: EngineAddress, decode: EngineAddress, request_id: str) -> Handover:
    """A new transfer, under an id that nobody has used."""
    transfer_id = uuid.uuid4().hex
    if prefill.legacy or decode.legacy:
        legacy_id = f"___prefill_addr_{prefill.kv[0]}___decode_addr_{decode.kv[0]}_{transfer_id}"
        return Handover(legacy_id, None, None)
    return Handover(
        request_id,
        {"transfer_id": transfer_id, "do_remote_decode": True, "remote_addresses": list(decode.kv)},
        {"transfer_id": transfer_id, "do_remote_prefill": True, "remote_addresses": list(prefill.kv)},
    )


class _Reply(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def was_sent(handover: Handover, reply: bytes) -> bool:
    """Whether a prefill engine's answer says that it sends the KV; by request ids alone none is told."""
    if handover.to_prefill is None:
        return True
    try:
        params = msgspec.json.decode(reply, type=_Reply).kv_transfer_params
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return params is not None and params.get("transfer_id") == handover.to_prefill["transfer_id"]
