"""Makes the parts of an engine, and ends them in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.errors import TransferError
from kvferry.p2p.carriers.choice import Carriers, offered
from kvferry.p2p.carriers.host import HostCarrier
from kvferry.p2p.carriers.ipc.carrier import IpcCarrier
from kvferry.p2p.carriers.links import Links
from kvferry.p2p.carriers.nccl.carrier import NcclCarrier
from kvferry.p2p.config import P2pConfig, new_instance_id
from kvferry.p2p.core import Core
from kvferry.p2p.memory_pool import TensorMemoryPool
from kvferry.p2p.nccl import NcclSettings
from kvferry.p2p.receive.copies import Copies
from kvferry.p2p.receive.regions import BufferRegion, PoolRegion, Region
from kvferry.p2p.receive.store import RecvStore
from kvferry.p2p.signal.handshake import HOST_CARRIER, IPC_CARRIER, NCCL_CARRIER, Self
from kvferry.p2p.signal.loop import Loop
from kvferry.p2p.signal.messages import About
from kvferry.p2p.signal.session import Session
from kvferry.p2p.signal.sessions import Sessions
from kvferry.p2p.signal.sockets import Sockets

_MAX_CTAS = 96  # of all communicators together: they must find place on a GPU at once
_BOOT_ID = "/proc/sys/kernel/random/boot_id"

Call = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """All that an engine is made of."""

    sockets: Sockets
    loop: Loop
    links: Links[Session]
    copies: Copies
    sessions: Sessions
    core: Core
    ipc: IpcCarrier
    nccl: NcclCarrier
    host: HostCarrier

    def start(self) -> None:
        self.copies.start()
        self.links.start()
        self.loop.start()

    @property
    def all_carriers(self) -> Carriers:
        return Carriers(self.ipc, self.nccl, self.host)

    def close(self) -> None:
        """End the loop; `end` is the last that it does. Idempotent."""
        self.loop.close()

    def snapshot(self) -> dict[str, Any]:
        """Figures for people, made in the loop's thread."""
        core = self.core
        return {
            "peers": {session.where: session.carrier for session in self.sessions.all() if session.is_up},
            "fallbacks": {session.where: session.why for session in self.sessions.all() if session.why},
            "not_offered": core.not_offered,
            "sending": len(core.outgoing),
            "receiving": len(core.incoming),
            "unclaimed": core.incoming.num_unclaimed,
            "blocks_kept_beyond_lease": core.outgoing.blocks_kept_beyond_lease,
            "nccl_bytes_per_peer": self.nccl.bytes_per_peer,
            "ipc_copies_beyond_lease": self.ipc.num_expired,
            "used_bytes": core.store.used_bytes(),
            "refused": dict(core.incoming.refused),
            **dict(self.sessions.counters),
            **dict(core.counters),
        }


class _Events:
    """What other threads tell: posted to the loop, and dropped once that has ended."""

    def __init__(self) -> None:
        self.parts: Parts | None = None

    def post(self, call: Call) -> None:
        assert self.parts is not None
        with contextlib.suppress(TransferError):
            self.parts.loop.post(call)

    @property
    def _made(self) -> Parts:
        assert self.parts is not None
        return self.parts

    def link_up(self, session: Session) -> None:
        self.post(partial(self._made.sessions.link_up, session))

    def link_lost(self, session: Session, reason: str) -> None:
        self.post(partial(self._made.sessions.link_lost, session, reason))

    def item_landed(self, session: Session, number: int, *items: int) -> None:
        self.post(partial(self._made.core.item_landed, session, number, *items))

    def released(self, number: int) -> None:
        self.post(partial(self._made.core.source_released, number))

    def landing_stopped(self, session: Session, number: int) -> None:
        self.post(partial(self._made.core.landing_stopped, session, number))

    def carrier_failed(self, session: Session, error: TransferError) -> None:
        self.post(partial(self._made.sessions.end, session, error, tell=True))


def assemble(config: P2pConfig) -> Parts:
    """All parts, not started.

    Raises ShareError where nothing can listen at the address, CudaError, LayoutError where its GPU cannot be used.
    """
    events = _Events()
    with ExitStack() as undo:
        sockets = Sockets(config.address, config.curve_secret_key)
        undo.callback(sockets.close)
        links: Links[Session] = Links(sockets.host, events)
        undo.callback(links.close)
        own = Self(new_instance_id(), config.secret, _about(config, sockets.address))
        sessions = Sessions(own, sockets, links, heartbeat_s=config.heartbeat_s, set_up_s=config.connect_timeout_s)
        copies = Copies(config.device)
        undo.callback(copies.close)
        store = RecvStore(_regions(config))
        undo.callback(store.close)
        core = Core(sessions, store, copies, events.post, lease_s=config.lease_s)
        host = core.carriers[HOST_CARRIER] = HostCarrier(links, events, sessions.send, events.post)
        undo.callback(host.close)
        ipc = core.carriers[IPC_CARRIER] = IpcCarrier(host, events, sessions.send, events.post)
        undo.callback(ipc.close)
        settings = NcclSettings(
            max_ctas=config.nccl_num_channels, max_communicators=_MAX_CTAS // config.nccl_num_channels
        )
        nccl = core.carriers[NCCL_CARRIER] = NcclCarrier(events, sessions.send, events.post, settings)
        undo.callback(nccl.close)
        sessions.mapper = ipc
        if config.carrier == IPC_CARRIER:
            ipc.start()
        found = offered(config.carrier, Carriers(ipc, nccl, host), config.device)
        sessions.own = own.offering(found.carriers, found.device_uuid)
        loop = Loop(core.tick, partial(_end, events))
        parts = events.parts = Parts(sockets, loop, links, copies, sessions, core, ipc, nccl, host)
        sessions.begin(loop, core)
        undo.pop_all()
    return parts


def _about(config: P2pConfig, address: str) -> About:
    """This engine, before it is known what it offers."""
    return About(
        address=address,
        host_id=_host_id(),
        device_uuid="",
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        carriers=(HOST_CARRIER,),
        geometry=None,
    )


def _end(events: _Events) -> None:
    """In the loop's thread: nothing may touch anybody's memory any more before the futures end."""
    parts = events.parts
    assert parts is not None
    error = TransferError("closed", "this engine is closed")
    for session in parts.sessions.all():
        parts.sessions.end(session, error, tell=True)
    parts.links.close()
    parts.copies.close()
    for carrier in parts.core.carriers.values():
        carrier.close()
    parts.core.outgoing.close(error)
    parts.core.incoming.close(error)
    parts.core.store.close()
    parts.sockets.close()


def _regions(config: P2pConfig) -> tuple[Region, ...]:
    """The receive buffer, and the pool where there is one."""
    buffer = BufferRegion(config.kv_buffer_size, device=config.device)
    pool_bytes = int(config.mem_pool_size_gb * (1 << 30))
    return (buffer, PoolRegion(TensorMemoryPool(pool_bytes, device=config.device))) if pool_bytes else (buffer,)


def _host_id() -> str:
    """Equal for all that runs under one kernel."""
    with open(_BOOT_ID, encoding="ascii") as boot_id:
        return boot_id.read().strip()
