"""Which HTTP headers go through, to an engine and back. Pure; names are in lower case."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from kvferry.router.addresses import EngineAddress

__all__ = ["Headers", "answer_headers", "clean_request_id", "engine_headers"]

Headers = list[tuple[bytes, bytes]]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_OF_A_CONNECTION = frozenset(  # RFC 9110, 7.6.1
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)
# Made anew for each engine.
_OURS = frozenset(b"host content-length content-type accept-encoding expect x-request-id x-data-parallel-rank".split())
_OF_A_SERVER = frozenset(b"content-length date server".split())


def clean_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's id for its request where engines read nothing else into it, or a new one."""
    given = next((value.decode("latin-1") for name, value in headers if name == b"x-request-id"), "")
    return given if _REQUEST_ID.fullmatch(given) and "___" not in given else uuid.uuid4().hex


def engine_headers(headers: Headers, address: EngineAddress, request_id: str) -> Headers:
    """A client's headers as they go to an engine: its authorisation with them, what is of its connection not."""
    passed = [each for each in _without_connection(headers) if each[0] not in _OURS]
    passed += [
        (b"content-type", b"application/json"),
        (b"accept-encoding", b"identity"),  # what is passed on as it comes has to be read here, too
        (b"x-request-id", request_id.encode()),
    ]
    if address.key.dp_rank is not None:
        passed.append((b"x-data-parallel-rank", b"%d" % address.key.dp_rank))
    return passed


def answer_headers(headers: Headers) -> Headers:
    """An engine's headers as they go to the client."""
    return [each for each in _without_connection(headers) if each[0] not in _OF_A_SERVER]


def _without_connection(headers: Headers) -> Headers:
    listed = {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
    return [each for each in headers if each[0] not in _OF_A_CONNECTION and each[0] not in listed]
