"""How one engine takes part: built once, checked when made."""

from __future__ import annotations

import math
import numbers
import os
from dataclasses import dataclass, field

from kvferry.settings import is_loopback, split_host_port

SEND_TYPES = ("PUT_ASYNC", "PUT", "GET")
CARRIERS = ("auto", "ipc", "nccl", "host")
MIN_TOKEN_BYTES = 16  # whoever hears a handshake can try secrets against it
CURVE_KEY_CHARS = 40
_MAX_SECONDS = 86_400
_KINDS: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    ("a string", str, ("address", "send_type", "carrier", "token", "curve_secret_key")),
    ("a whole number", numbers.Integral, ("device", "kv_buffer_size", "nccl_num_channels", "tp_rank", "tp_size")),
    ("a number", numbers.Real, ("mem_pool_size_gb", "heartbeat_s", "connect_timeout_s", "lease_s")),
)
_MAY_BE_NONE = ("device", "token", "curve_secret_key")


@dataclass(frozen=True, kw_only=True)
class P2pConfig:
    """How one engine takes part. Raises ValueError where a value is out of range, or lets strangers in.

    Parameters
    ----------
    address
        `HOST:PORT` to listen at, IPv6 in brackets; port 0 for any free one.
    send_type
        `PUT_ASYNC`: send in the background; `PUT`: `send_tensor` waits until it has landed; `GET`: keep until asked.
    carrier
        `auto`: the best that both sides have; or the only one to use.
    device
        The GPU of this engine, as torch numbers it: received tensors lie there. None: in host memory.
    kv_buffer_size
        Bytes of the receive buffer, for what lands before it is claimed; memory of the GPU where there is one.
    mem_pool_size_gb
        GiB of host memory behind it, pinned where there is a GPU; 0 for none.
    heartbeat_s
        A peer that was silent for three of them is taken for dead.
    connect_timeout_s
        How long a session's set-up may take.
    lease_s
        How long what is sent waits to be taken, and what has landed to be claimed.
    nccl_num_channels
        Multiprocessors that NCCL may take for one peer; both sides need the same number.
    tp_rank, tp_size
        Which tensor-parallel rank of how many this engine is.
    token
        A secret of at least 16 bytes that all engines share.
    curve_secret_key
        The secret key of a CURVE pair (40 characters, as `zmq.curve_keypair` gives it) that all engines share: it
        encrypts signalling, and lets in only who has it. The bytes of KV are not encrypted.
    insecure
        Let anybody in who reaches the address.
    """

    address: str = "127.0.0.1:0"
    send_type: str = "PUT_ASYNC"
    carrier: str = "auto"
    device: int | None = None
    kv_buffer_size: int = 1 << 30
    mem_pool_size_gb: float = 0.0
    heartbeat_s: float = 2.0
    connect_timeout_s: float = 5.0
    lease_s: float = 60.0
    nccl_num_channels: int = 8
    tp_rank: int = 0
    tp_size: int = 1
    token: str | None = field(default=None, repr=False)
    curve_secret_key: str | None = field(default=None, repr=False)
    insecure: bool = False

    def __post_init__(self) -> None:
        self._check_kinds()
        host, _ = split_host_port(self.address)
        _one_of("send_type", self.send_type, SEND_TYPES)
        _one_of("carrier", self.carrier, CARRIERS)
        for name in ("heartbeat_s", "connect_timeout_s", "lease_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 < value <= _MAX_SECONDS):
                raise ValueError(f"{name} is {value!r}; it must be more than 0 and at most {_MAX_SECONDS} seconds")
        if self.device is not None and self.device < 0:
            raise ValueError(f"device is {self.device}; it is the number of a GPU")
        if self.kv_buffer_size < 0:
            raise ValueError(f"kv_buffer_size is {self.kv_buffer_size}; it must be at least 0 bytes")
        if not 0 <= self.mem_pool_size_gb < 1 << 20:
            raise ValueError(f"mem_pool_size_gb is {self.mem_pool_size_gb}; it must be 0 to 1048575 GiB")
        if not 1 <= self.nccl_num_channels <= 64:
            raise ValueError(f"nccl_num_channels is {self.nccl_num_channels}; it must be between 1 and 64")
        if not 0 <= self.tp_rank < self.tp_size <= 1 << 16:
            raise ValueError(f"tp_rank {self.tp_rank} of tp_size {self.tp_size}; ranks start at 0")
        if self.token is not None and len(self.token.encode()) < MIN_TOKEN_BYTES:
            raise ValueError(f"the token is shorter than {MIN_TOKEN_BYTES} bytes")
        if self.curve_secret_key is not None and len(self.curve_secret_key) != CURVE_KEY_CHARS:
            raise ValueError(f"the CURVE key does not have {CURVE_KEY_CHARS} characters")
        if not (is_loopback(host) or self.token or self.curve_secret_key or self.insecure):
            raise ValueError(
                f"{self.address} can be reached from other machines: give all engines a token or a CURVE key, "
                "or say insecure=True where the network itself keeps strangers away"
            )

    def _check_kinds(self) -> None:
        for what, kind, names in _KINDS:
            for name in names:
                value = getattr(self, name)
                if not (value is None and name in _MAY_BE_NONE) and (not isinstance(value, kind) or value is True):
                    shown = "" if kind is str else f"{value!r}, "  # a secret is shown to nobody
                    raise ValueError(f"{name} is {shown}of type {type(value).__name__}; it must be {what}")

    @property
    def secret(self) -> bytes | None:
        """The token's bytes."""
        return None if self.token is None else self.token.encode()


def new_instance_id() -> bytes:
    """What tells an engine from every other one, also from one that had its address before."""
    return os.urandom(16)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
