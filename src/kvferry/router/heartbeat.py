"""What engines say of themselves every few seconds: one MessagePack map. Pure.

`type` "P" or "D", `http_address` and `zmq_address` (of rank 0) are what vLLM's own connector sent before its removal.
An engine that says `kvferry` (a version) knows transfers by `kv_transfer_params`; it may name the addresses of all its
ranks, its data-parallel rank, and that it is leaving. One that has a secret says all of it once more in `signed`, with
the time, and its `mac`.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from kvferry.errors import WireError
from kvferry.router.addresses import MAX_RANKS, EngineAddress, EngineKey, Role, clean_address

__all__ = ["MAX_HEARTBEAT_BYTES", "Heartbeat", "UntrustedError", "decode_heartbeat", "read_secret"]

MAX_HEARTBEAT_BYTES = 64 << 10
MAX_AGE_S = 60.0  # of a signed one, so that none can be used for long by who has seen it; clocks may differ by that
MIN_SECRET_BYTES = 16
_LABEL = b"kvferry heartbeat 1\0"
_Address = Annotated[str, msgspec.Meta(min_length=2, max_length=300)]


class UntrustedError(WireError):
    """A heartbeat that does not come from an engine with the secret, or not from now."""


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
    sent_at: float = 0.0


class _Sealed(msgspec.Struct):
    signed: bytes
    mac: bytes


def read_secret(path: str) -> bytes:
    """What engines have as token_file, or curve_key_file. Raises ValueError where it is none."""
    try:
        secret = Path(path).read_text(encoding="utf-8").strip().encode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token_file: {error}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"token_file: the secret in {path} is shorter than {MIN_SECRET_BYTES} bytes")
    return secret


def decode_heartbeat(data: bytes, secret: bytes | None = None, now: float = 0.0) -> Heartbeat:
    """Raises WireError where it is none; with a `secret` UntrustedError where it is not signed by it about `now`."""
    if len(data) > MAX_HEARTBEAT_BYTES:
        raise WireError(f"a heartbeat of {len(data)} bytes; at most {MAX_HEARTBEAT_BYTES} are read")
    if secret is not None:
        data = _opened(data, secret)
    try:
        beat = msgspec.msgpack.decode(data, type=_Map)
        kv = tuple(clean_address(each) for each in beat.zmq_addresses or [beat.zmq_address])
        key = EngineKey(Role(beat.type), clean_address(beat.http_address), beat.dp_rank)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"no heartbeat: {error}") from None
    if secret is not None and not abs(now - beat.sent_at) <= MAX_AGE_S:
        raise UntrustedError(f"{key} sent it {now - beat.sent_at:.0f} s ago; at most {MAX_AGE_S:g} s are possible")
    is_legacy = beat.kvferry is None and beat.zmq_addresses is None and beat.dp_rank is None
    return Heartbeat(EngineAddress(key, kv, legacy=is_legacy), beat.leaving)


def _opened(data: bytes, secret: bytes) -> bytes:
    """What is signed in it."""
    try:
        sealed = msgspec.msgpack.decode(data, type=_Sealed)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise UntrustedError("it is not signed: engines need the router's secret as token_file") from None
    if not hmac.compare_digest(sealed.mac, hmac.digest(secret, _LABEL + sealed.signed, "sha256")):
        raise UntrustedError("it is signed with another secret than the router's")
    return sealed.signed
