"""Proof that a peer has the token, which itself never travels."""

from __future__ import annotations

import enum
import hmac

_LABEL = b"kvferry p2p 1"


class Role(enum.Enum):
    """Whose proof it is, so that one side's is of no use as the other's."""

    INITIATOR = b"initiator"
    ACCEPTOR = b"acceptor"


def prove(secret: bytes | None, role: Role, parts: tuple[bytes, ...]) -> bytes:
    """The MAC over all that a handshake has settled; empty without a token."""
    if secret is None:
        return b""
    fields = (_LABEL, role.value, *parts)
    return hmac.digest(secret, b"".join(len(field).to_bytes(4, "little") + field for field in fields), "sha256")


def accepts(secret: bytes | None, role: Role, parts: tuple[bytes, ...], mac: bytes) -> bool:
    """Whether `mac` is what `prove` gives; the time that takes says nothing of where they differ."""
    return hmac.compare_digest(mac, prove(secret, role, parts))
