"""How long the server waits for its peers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Times in seconds.

    `greeting_s` is from connecting to being welcome, `frame_s` from a frame's first byte to its last, `linger_s` what
    an ended session may take to read its last frames. Peers over TCP are to be heard every `heartbeat_s`.
    """

    greeting_s: float = 10.0
    frame_s: float = 60.0
    linger_s: float = 2.0
    heartbeat_s: float = 5.0

    @property
    def silence_s(self) -> float:
        """After so long without a byte a peer over TCP is taken for gone."""
        return 3 * self.heartbeat_s
