"""One client as the loop thread knows it: its connection, its cache, its jobs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvferry.protocol.auth import Token
from kvferry.protocol.messages import Hello, Message
from kvferry.server.engines import Engine, Rank
from kvferry.server.net.connection import Connection
from kvferry.server.work.worker import DeviceWorker


class CacheState(enum.Enum):
    """OPENING: descriptors are coming. PROVEN: the server has shown what it reads. LIVE: in use. CLOSING: unmapping."""

    OPENING = "opening"
    PROVEN = "proven"
    LIVE = "live"
    CLOSING = "closing"


@dataclass(slots=True, eq=False)
class RankCache:
    """One registration: a rank's KV cache, on its way in, in use, or on its way out.

    `nbytes` is what its blocks have together. `seq` is that of its Register, `unregister_seqs` those of the Unregisters
    which wait for an answer.
    """

    cache_id: int
    session: Session
    engine: Engine
    rank: int
    worker: DeviceWorker
    nbytes: int
    seq: int
    num_fds: int
    state: CacheState = CacheState.OPENING
    fds_sent: int = 0
    fds_taken: int = 0
    unregister_seqs: list[int] = field(default_factory=list)

    @property
    def entry(self) -> Rank:
        """The rank's place in its engine."""
        return self.engine.ranks[self.rank]


@dataclass(slots=True, eq=False)
class Greeting:
    """How far a session has come towards being welcome. `version` is the protocol spoken, 0 until then.

    A `remote` peer is at the other end of a TCP connection: it has shown a token once it is welcome, and can send no
    descriptors. An `own` one runs as the server's own user, as the kernel says. `token` and `nonce` are set while its
    proof is awaited, and after.
    """

    remote: bool
    begun_at: float
    own: bool = False
    hello: Hello | None = None
    token: Token | None = None
    nonce: bytes = b""
    version: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """One connected client. `caches` holds all registrations that the worker still knows, `cache` the current one.

    `leaving` is the last that was dropped, until its memory is unmapped. `uncommitted_bytes` are what the stores that
    are going on hold of the server's memory.
    """

    session_id: int
    tenant: str
    greeting: Greeting
    connection: Connection = field(init=False)
    pidfd: int | None = None
    engine_id: str | None = None
    cache: RankCache | None = None
    leaving: RankCache | None = None
    caches: set[int] = field(default_factory=set)
    jobs: dict[int, int] = field(default_factory=dict)  # the client's seq -> our job id
    uncommitted_bytes: int = 0
    ended: bool = False
    end_text: str = ""
    close_by: float | None = None

    @property
    def welcome(self) -> bool:
        """Whether the greeting is over, and it may ask for anything."""
        return self.greeting.version > 0

    def send(self, message: Message) -> None:
        """Queue a frame; nothing where the client is gone."""
        self.connection.send(message)
