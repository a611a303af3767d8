"""What a request says of where its KV comes from, or goes to: kv_transfer_params, or the old form of request ids.

It comes from whoever reaches the engine's HTTP server, so everything in it is checked.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.settings import join_host_port, split_host_port

MAX_ID_CHARS = 200
_MAX_REQUEST_ID_CHARS = 2048
_Address = Annotated[str, Meta(max_length=300)]
_LEGACY = re.compile(r"___prefill_addr_(\S+?:\d{1,5})___decode_addr_(\S+?:\d{1,5})_[0-9a-f]{32}")


class HandoverError(Exception):
    """What a request says of its KV makes no sense here, so its tokens are computed, and nothing is handed over."""


@dataclass(frozen=True, slots=True)
class Handover:
    """One request's part in one transfer: this engine `sends` the prompt's KV, or awaits it.

    `addresses` are those of the other engine's tensor-parallel ranks; empty where they are not known. `ask` is for who
    awaits: the other engine keeps the KV until it is asked.
    """

    transfer_id: str
    sends: bool
    addresses: tuple[str, ...] = ()
    ask: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """What this engine is in all transfers: its kv_role, its send type, and how many ranks it has."""

    sends: bool
    receives: bool
    get: bool
    tp_size: int


class _Params(msgspec.Struct):
    """kv_transfer_params; other connectors' keys may be there, too."""

    transfer_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_addresses: Annotated[list[_Address], Meta(max_length=1024)] | None = None
    ask: bool = False


def handover_of(params: object, request_id: str, part: Part, own_address: str = "") -> Handover | None:
    """What a request wants handed over; None for a request of its own. `own_address` is rank 0's of this engine.

    `params` are its kv_transfer_params, if it has any: vLLM takes them out of `vllm_xargs`, too, whatever they are
    there. Raises HandoverError.
    """
    if not isinstance(params, Mapping | None):
        raise HandoverError(f"kv_transfer_params are of the type {type(params).__name__}; they are a map")
    if params and (params.get("do_remote_decode") or params.get("do_remote_prefill")):
        found = _from_params(params, part)
    elif len(request_id) <= _MAX_REQUEST_ID_CHARS and (match := _LEGACY.search(request_id)) is not None:
        found = _from_id(match, part, own_address)
    else:
        return None
    if not (part.sends if found.sends else part.receives):
        role = "kv_consumer" if found.sends else "kv_producer"
        raise HandoverError(f"kv_role is {role}, and the request wants KV to be {'sent' if found.sends else 'awaited'}")
    if found.addresses and len(found.addresses) % part.tp_size and part.tp_size % len(found.addresses):
        raise HandoverError(
            f"the other engine has {len(found.addresses)} ranks, this one {part.tp_size}: one must be a multiple"
        )
    return found


def answer(handover: Handover, own_addresses: Sequence[str]) -> dict[str, Any]:
    """The kv_transfer_params that a prefill engine's response carries: those of the decode engine's request."""
    params: dict[str, Any] = {
        "transfer_id": handover.transfer_id,
        "do_remote_prefill": True,
        "remote_addresses": list(own_addresses),
    }
    return params if handover.addresses else params | {"ask": True}


def _from_params(params: Mapping[str, Any], part: Part) -> Handover:
    try:
        found = msgspec.convert(dict(params), _Params)
    except msgspec.ValidationError as error:
        raise HandoverError(f"kv_transfer_params: {error}") from None
    addresses = tuple(found.remote_addresses or ())
    for address in addresses:
        _check_address(address)
    if not found.do_remote_prefill:
        return Handover(found.transfer_id or uuid.uuid4().hex, True, addresses)
    if found.transfer_id is None:
        raise HandoverError("kv_transfer_params have do_remote_prefill and no transfer_id")
    ask = found.ask or part.get
    if ask and not addresses:
        raise HandoverError("kv_transfer_params have no remote_addresses, and the other engine is to be asked")
    return Handover(found.transfer_id, False, addresses, ask)


def _from_id(match: re.Match[str], part: Part, own_address: str) -> Handover:
    prefill, decode = match[1], match[2]
    sends = part.sends
    if part.sends and part.receives:
        if own_address not in (prefill, decode):
            raise HandoverError(f"the request id names {prefill} and {decode}; this engine is {own_address}")
        sends = own_address == prefill
    if len(match[0]) > MAX_ID_CHARS:
        raise HandoverError(f"the request id has addresses of {len(match[0])} characters, more than {MAX_ID_CHARS}")
    host, port = _check_address(decode if sends else prefill)
    if port + part.tp_size > 65_536:
        raise HandoverError(f"{host}:{port} leaves no ports for {part.tp_size} ranks")
    addresses = tuple(join_host_port(host, port + rank) for rank in range(part.tp_size))
    return Handover(match[0], sends, addresses, ask=part.get and not sends)


def _check_address(address: str) -> tuple[str, int]:
    try:
        return split_host_port(address)
    except ValueError as error:
        raise HandoverError(str(error)) from None
