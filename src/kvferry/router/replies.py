"""Errors and event streams as OpenAI's clients read them. Pure."""

from __future__ import annotations

import json

__all__ = ["EventCutter", "error_body", "error_event", "error_in_event", "has_event"]

_TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 405: "invalid_request_error"}
_TYPES |= {408: "invalid_request_error", 413: "invalid_request_error"}
_MAX_TAIL_BYTES = 1 << 20
_ENDS = (b"\n\n", b"\r\n\r\n")  # of an event


def error_body(status: int, text: str, *, code: str, param: str | None = None) -> bytes:
    """An error object; `code` is a word that programs can go by."""
    error = {"message": text, "type": _TYPES.get(status, "server_error"), "param": param, "code": code}
    return json.dumps({"error": error}).encode()


def error_event(status: int, text: str, *, code: str) -> bytes:
    """An error within a stream, after which it ends."""
    return b"data: " + error_body(status, text, code=code) + b"\n\n"


def error_in_event(event: bytes) -> int | None:
    """The status in a stream's event that is an engine's error; None where it is something else."""
    if not event.startswith(b'data: {"error"'):
        return None
    try:
        error = json.loads(event.removeprefix(b"data: ").split(b"\n", 1)[0])["error"]
        code = error["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return code if isinstance(code, int) else 500


def has_event(data: bytes) -> bool:
    """Whether a stream that begins so has a whole event, or more than one may have."""
    return any(mark in data for mark in _ENDS) or len(data) > _MAX_TAIL_BYTES


class EventCutter:
    """Lets whole events of a stream through, so that another event can follow wherever it breaks off."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        """What is whole now; what is longer than 1 MiB goes through in parts."""
        data = self._tail + data
        end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _ENDS)
        if len(data) - end > _MAX_TAIL_BYTES:
            end = len(data)
        self._tail = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What has come of an event that did not end."""
        return self._tail
