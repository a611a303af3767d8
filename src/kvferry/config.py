"""The configuration of the cache server: built once, checked when made, passed down whole.

Each field carries its `Setting`, from which flags, environment variables, keys of the TOML file and the table in
docs/cache-server.md come. There is no second list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.settings import (
    Kind,
    Setting,
    are_options,
    check_settings,
    choice,
    is_host_port,
    is_remote_url,
    path,
    quotas,
    seconds,
    settings_of,
)

DEVICES = ("auto", "cpu", "cuda")
WRITE_POLICIES = ("write-through", "write-back")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
_MAX_PATH_BYTES = 107  # what a Unix socket's address holds


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How one cache server runs. What a field means, and may be, is said beside it."""

    socket_path: str = field(
        metadata=Setting(
            name="socket",
            kind=Kind.TEXT,
            help="Path of the Unix socket to listen on.",
            allowed=f"a path of 1 to {_MAX_PATH_BYTES} bytes, which is what a Unix socket's address holds",
            check=lambda text: 0 < len(text.encode()) <= _MAX_PATH_BYTES and "\0" not in text,
        ).metadata
    )
    listen: str | None = field(
        default=None,
        metadata=Setting(
            name="listen",
            kind=Kind.TEXT,
            help="Listen on TCP, too, for engines in isolated containers; needs token-file. Nothing is encrypted.",
            allowed="tcp://HOST:PORT, or tcp://:PORT for loopback, with port 0 for any free one",
            check=lambda text: text.startswith("tcp://") and is_host_port(text[len("tcp://") :]),
        ).metadata,
    )
    token_file: str | None = field(
        default=None,
        metadata=path(
            "token-file", "File of mode 0600 with lines NAME:SECRET; each token is a tenant of its own."
        ).metadata,
    )
    memory_bytes: int = field(
        default=4 << 30,
        metadata=Setting(
            name="memory",
            kind=Kind.SIZE,
            help="Host memory for KV, pinned where GPUs are served.",
            allowed="a size of at least 64KiB, for example 4GiB",
            check=lambda size: size >= 1 << 16,
        ).metadata,
    )
    device: str = field(
        default="auto",
        metadata=choice(
            "device", "Serve GPUs (cuda), host memory only (cpu), or GPUs where there are any (auto).", DEVICES
        ).metadata,
    )
    allow_uids: frozenset[int] = field(
        default=frozenset(),
        metadata=Setting(
            name="allow-uid",
            kind=Kind.COUNTS,
            help="Another uid that may connect, with a cache of its own.",
            allowed="whole numbers from 0 to 4294967294",
            check=lambda uids: all(isinstance(uid, int) and 0 <= uid < (1 << 32) - 1 for uid in uids),
        ).metadata,
    )
    socket_group: str | None = field(
        default=None,
        metadata=Setting(
            name="socket-group",
            kind=Kind.TEXT,
            help="Group whose members may connect; the Unix socket is given to it, with mode 0660.",
            allowed="the name or number of a group",
            check=bool,
        ).metadata,
    )
    lease_ttl_s: float = field(
        default=60.0,
        metadata=seconds(
            "lease-ttl-s", "How long a lookup's promise holds when nobody takes or releases it.", 0.001
        ).metadata,
    )
    max_sessions: int = field(
        default=256,
        metadata=Setting(
            name="max-sessions",
            kind=Kind.COUNT,
            help="Connections at one time.",
            allowed="a number of at least 1",
            check=lambda count: count >= 1,
        ).metadata,
    )
    tenant_sessions: int | None = field(
        default=None,
        metadata=Setting(
            name="tenant-sessions",
            kind=Kind.COUNT,
            help="Connections of one tenant at one time. Not set: half of max-sessions; all where there is one tenant.",
            allowed="a number of at least 1",
            check=lambda count: count >= 1,
        ).metadata,
    )
    disk_path: str | None = field(
        default=None, metadata=path("disk", "Folder of the disk tier, for this server alone; needs disk-size.").metadata
    )
    disk_bytes: int | None = field(
        default=None,
        metadata=Setting(
            name="disk-size",
            kind=Kind.SIZE,
            help="How much the disk tier may hold.",
            allowed="a size of at least 1MiB, for example 500GiB",
            check=lambda size: size >= 1 << 20,
        ).metadata,
    )
    remote_url: str | None = field(
        default=None,
        metadata=Setting(
            name="remote",
            kind=Kind.TEXT,
            help="Object store behind the other tiers; needs the package obstore, the extra `remote` of kvferry.",
            allowed="s3://BUCKET/PREFIX or file:///PATH, without credentials, which go into remote-option",
            check=is_remote_url,
            shown=lambda url: not {"@", "?"} & set(url),
        ).metadata,
    )
    remote_options: Mapping[str, str] = field(
        default_factory=dict,
        repr=False,
        metadata=Setting(
            name="remote-option",
            kind=Kind.OPTIONS,
            help="Option of the object store, e.g. endpoint=http://127.0.0.1:9000 or access_key_id=KEY. Never shown.",
            allowed="NAME=VALUE with the names of obstore's options",
            check=are_options,
            shown=lambda _: False,
        ).metadata,
    )
    write_policy: str = field(
        default="write-through",
        metadata=choice(
            "write-policy",
            "Write chunks to lower tiers at once (write-through) or as memory fills up (write-back).",
            WRITE_POLICIES,
        ).metadata,
    )
    drain_s: float = field(
        default=30.0,
        metadata=seconds(
            "drain-s", "How long the end may take to write to lower tiers what is in none, and to delete.", 0
        ).metadata,
    )
    tenant_quotas: Mapping[str, int] = field(default_factory=dict, metadata=quotas("tenant-quota", "memory").metadata)
    tenant_disk_quotas: Mapping[str, int] = field(
        default_factory=dict, metadata=quotas("tenant-disk-quota", "of the disk tier").metadata
    )
    tenant_remote_quotas: Mapping[str, int] = field(
        default_factory=dict, metadata=quotas("tenant-remote-quota", "of the object store").metadata
    )
    verify_memory: bool = field(
        default=False,
        metadata=Setting(
            name="verify-memory",
            kind=Kind.SWITCH,
            help="Checksum chunks in memory, too: made when they are stored, checked when they are retrieved.",
            allowed="true or false",
            check=lambda _: True,
        ).metadata,
    )
    metrics: str | None = field(
        default=None,
        metadata=Setting(
            name="metrics",
            kind=Kind.TEXT,
            help="Serve /metrics (Prometheus) and /health by HTTP at this address.",
            allowed="HOST:PORT, or :PORT for loopback, with port 0 for any free one",
            check=is_host_port,
        ).metadata,
    )
    stall_s: float = field(
        default=5.0,
        metadata=seconds("stall-s", "A thread that has not moved for so long makes the server unhealthy.", 2).metadata,
    )
    log_format: str = field(
        default="text", metadata=choice("log-format", "How records are written, one a line.", LOG_FORMATS).metadata
    )
    log_level: str = field(
        default="info", metadata=choice("log-level", "The least that is written.", LOG_LEVELS).metadata
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.listen is not None and self.token_file is None:
            raise ValueError("listen (TCP) needs token-file: anybody could connect otherwise")
        if (self.disk_path is None) != (self.disk_bytes is None):
            raise ValueError("disk and disk-size go together: one of them is not set")
        if self.remote_options and self.remote_url is None:
            raise ValueError("remote-option is set, but no remote")
        if self.tenant_disk_quotas and self.disk_path is None:
            raise ValueError("tenant-disk-quota is set, but no disk")
        if self.tenant_remote_quotas and self.remote_url is None:
            raise ValueError("tenant-remote-quota is set, but no remote")


def sessions_of_a_tenant(config: ServerConfig) -> int:
    """How many connections one tenant may have at one time."""
    if config.tenant_sessions is not None:
        return config.tenant_sessions
    alone = not (config.allow_uids or config.socket_group is not None or config.token_file is not None)
    return config.max_sessions if alone else max(1, config.max_sessions // 2)


def server_settings() -> dict[str, Setting]:
    """How each field of `ServerConfig` is set, by the field's name."""
    return settings_of(ServerConfig)
