"""What any session may ask, and how it fails and ends."""

from __future__ import annotations

from kvferry.protocol.message import Message, Seq


class Stats(Message, frozen=True):
    """Ask for the server's counters."""

    seq: Seq


class StatsReply(Message, frozen=True):
    """The counters by name."""

    seq: int
    values: dict[str, float]


class Ping(Message, frozen=True):
    """Are you there?"""

    seq: Seq


class Pong(Message, frozen=True):
    """Yes."""

    seq: int


class Error(Message, frozen=True):
    """A request failed; with `seq` 0, the session did. `failed_blocks` of a retrieve hold no KV that may be used."""

    seq: int
    code: str
    text: str
    failed_blocks: bytes = b""


class Closed(Message, frozen=True):
    """The server's last frame of a session that it ends: nothing of it is in flight any more."""

    text: str
