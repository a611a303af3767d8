"""Who is there, and which version is spoken: the first frames of a session."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.protocol.message import MAC_BYTES, MAX_HEARTBEAT_S, TOKEN_NONCE_BYTES, Count, Message


class Hello(Message, frozen=True):
    """The first frame of a client: the versions that it speaks, `oldest` to `version`.

    Who has a token names it, and gives a nonce; the server then answers with a Challenge.
    """

    version: Count
    oldest: Count
    client: Annotated[str, Meta(max_length=512)] = ""
    token_name: Annotated[str, Meta(max_length=512)] = ""
    nonce: Annotated[bytes, Meta(max_length=TOKEN_NONCE_BYTES)] = b""


class Challenge(Message, frozen=True):
    """The server's nonce: prove that you have the token."""

    nonce: Annotated[bytes, Meta(min_length=TOKEN_NONCE_BYTES, max_length=TOKEN_NONCE_BYTES)]


class Prove(Message, frozen=True):
    """A MAC over both nonces under the token, which itself is never sent."""

    mac: Annotated[bytes, Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]


class Welcome(Message, frozen=True):
    """The answer: the version that is spoken from here on. `incarnation` is new with every start of the server.

    `mac` is the server's own proof of the token. Where `heartbeat_s` is above 0, each side sends something at least
    that often, and takes the other for gone after three times as long.
    """

    version: int
    incarnation: Annotated[bytes, Meta(max_length=64)]
    mac: Annotated[bytes, Meta(max_length=MAC_BYTES)] = b""
    heartbeat_s: Annotated[float, Meta(ge=0, le=MAX_HEARTBEAT_S)] = 0.0
