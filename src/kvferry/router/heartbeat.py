"""What engines say of themselves every few seconds: one MessagePack map. Pure.

`type` "P" or "D", `http_address` and `zmq_address` (of rank 0) are what vLLM's own connector sent before its removal.
An engine that says `kvferry` (a version) knows transfers by `kv_transfer_params`; it may name the addresses of all its
ranks, its data-parallel rank, and that it is leaving.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec

from kvferry.errors import WireError
from kvferry.router.addresses import MAX_RANKS, EngineAddress, EngineKey, Role, clean_address

__all__ = ["MAX_HEARTBEAT_BYTES", "Heartbeat", "decode_heartbeat"]

MAX_HEARTBEAT_BYTES = 32 << 10
_Address = Annotated[str, msgspec.Meta(min_length=2, max_length=300)]


class Heartbeat(NamedTuple):
    """One engine's word; `leaving` asks to be forgotten at once."""

    address: EngineAddress
    leaving: bool


class _Map(msgspec.Struct):
    type: Literal["P", "D"]
    http_address: _Address
    zmq_address: _Address
    kvferry: Annotated[int, msgspec.Meta(ge=1)] | None = None
    zmq_addresses: Annotated[list[_Address], msgspec.Meta(min_length=1, max_length=MAX_RANKS)] | None = None
    dp_rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] | None = None
    leaving: bool = False


def decode_heartbeat(data: bytes) -> Heartbeat:
    """Raises WireError where it is none."""
    if len(data) > MAX_HEARTBEAT_BYTES:
        raise WireError(f"a heartbeat of {len(data)} bytes; at most {MAX_HEARTBEAT_BYTES} are read")
    try:
        beat = msgspec.msgpack.decode(data, type=_Map)
        kv = tuple(clean_address(each) for each in beat.zmq_addresses or [beat.zmq_address])
        key = EngineKey(Role(beat.type), clean_address(beat.http_address), beat.dp_rank)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"no heartbeat: {error}") from None
    is_legacy = beat.kvferry is None and beat.zmq_addresses is None and beat.dp_rank is None
    return Heartbeat(EngineAddress(key, kv, legacy=is_legacy), beat.leaving)
