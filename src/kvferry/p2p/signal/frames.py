"""Messages as frames of bytes, which are bounded."""

from __future__ import annotations

import msgspec

from kvferry.errors import WireError
from kvferry.p2p.signal.messages import AnyMessage, Message

MAX_MESSAGE_BYTES = 256 << 10

_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode_message(message: Message) -> bytes:
    """Raises ValueError where it is longer than any peer takes."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} can be sent")
    return data


def decode_message(data: bytes) -> AnyMessage:
    """Raises WireError for everything that is no message."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise WireError(f"{len(data)} bytes that are no message: {error}") from None
