"""The configuration of the cache server: built once, checked when made, passed down whole."""

from __future__ import annotations

from dataclasses import dataclass

DEVICES = ("auto", "cpu", "cuda")
_MAX_PATH_BYTES = 107  # what a Unix socket's address holds


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How one cache server runs.

    Parameters
    ----------
    socket_path
        Where it listens: a Unix socket, for its own uid unless `allow_uids` says more.
    memory_bytes
        Host memory for KV chunks.
    device
        "cpu" serves host memory only; "cuda" serves GPUs too and needs one; "auto" is "cuda" where there is one.
    allow_uids
        Other uids that may connect. Each has a cache of its own.
    lease_ttl_s
        How long a lookup's promise holds when nobody takes or releases it.
    max_sessions
        Connections at one time.
    """

    socket_path: str
    memory_bytes: int = 4 << 30
    device: str = "auto"
    allow_uids: frozenset[int] = frozenset()
    lease_ttl_s: float = 60.0
    max_sessions: int = 256

    def __post_init__(self) -> None:
        length = len(self.socket_path.encode())
        if not 0 < length <= _MAX_PATH_BYTES:
            raise ValueError(f"socket_path has {length} bytes; a Unix socket's path has 1 to {_MAX_PATH_BYTES}")
        if self.memory_bytes < 1 << 16:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; give at least 65536")
        if self.device not in DEVICES:
            raise ValueError(f"device is {self.device!r}; it must be one of {', '.join(DEVICES)}")
        if any(uid < 0 for uid in self.allow_uids):
            raise ValueError(f"allow_uids has negative uids: {sorted(self.allow_uids)}")
        if not 0 < self.lease_ttl_s <= 86_400:
            raise ValueError(f"lease_ttl_s is {self.lease_ttl_s}; it must be above 0 and at most 86400")
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions is {self.max_sessions}; it must be at least 1")
