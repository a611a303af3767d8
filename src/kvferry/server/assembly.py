"""All parts of one server, made and joined: the one place that knows every one of them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.cache import ChunkIndex, LeaseTable, MissLog, Quotas, SlabPool
from kvferry.config import ServerConfig, sessions_of_a_tenant
from kvferry.errors import DeadlineError, ServerGoneError
from kvferry.ipc.table import process_table
from kvferry.protocol.address import Address
from kvferry.protocol.auth import read_tokens
from kvferry.server.limits import check_memory
from kvferry.server.memory import Memory
from kvferry.server.net.acceptor import Acceptor
from kvferry.server.net.admission import Admission
from kvferry.server.net.listener import group_id_of, make_listeners
from kvferry.server.net.loop import Loop
from kvferry.server.net.patience import Patience
from kvferry.server.sessions import Sessions
from kvferry.server.state import State
from kvferry.server.tiers.lower_tiers import LowerTiers
from kvferry.server.tiers.setup import make_tiers
from kvferry.server.tiers.tasks import TierDone
from kvferry.server.watch.health import Health
from kvferry.server.watch.metrics import MetricsServer
from kvferry.server.watch.snapshots import Question, Snapshot, Snapshots
from kvferry.server.watch.transfers import Transfers
from kvferry.server.work.devices import choose_devices
from kvferry.server.work.tasks import CacheClosed, CacheOpened, CopyDone, FdsTaken, MemoryReady, PrepareTask, StageDone
from kvferry.server.work.workers import Workers

_LOG = logging.getLogger(__name__)

_STOP_S = 10.0  # for threads of a server that did not come to start


@dataclass(frozen=True, slots=True)
class Parts:
    """What the server itself calls.

    `addresses` are where it listens, with real ports; `handlers`: what is done with each kind of item that is posted to
    the loop.
    """

    state: State
    sessions: Sessions
    acceptors: tuple[Acceptor, ...]
    addresses: tuple[Address, ...]
    health: Health
    snapshots: Snapshots
    metrics: MetricsServer | None
    handlers: Mapping[type, Callable[[Any], None]]

    def stop_threads(self, timeout_s: float) -> list[DeadlineError]:
        """End all threads that may use the memory; those that did not end in time, for which it can be called again."""
        return [*self.state.workers.stop(timeout_s), *self.state.tiers.stop(timeout_s)]


def assemble(config: ServerConfig, loop: Loop[Any], undo: contextlib.ExitStack, *, patience: Patience) -> Parts:
    """Make all parts of a server; `undo` gives back what they hold, once no thread runs any more.

    Where this fails, or a signal's handler raises in it, `undo` ends the threads that were started, first of all.

    Raises ShareError, CudaUnavailableError, ValueError as `CacheServer.start` says.
    """
    devices = choose_devices(config.device)
    late: list[DeadlineError] = []
    memory = _memory(config, undo, late)
    post = functools.partial(_post, loop.post, memory)
    workers = Workers(devices.make_host, devices.make_gpu, devices.gpus, memory_address=memory.address, post=post)
    state = _state(config, memory, workers, post, undo)
    health = Health(config.stall_s)
    health.watch(workers.pulses)
    health.watch(lambda: state.tiers.pulses(remote=False))
    health.watch(lambda: state.tiers.pulses(remote=True), mild=True)
    health.note(state.tiers.warnings)
    mapped = process_table().mappings.stats
    state.more_values += [health.values, state.tiers.values, lambda: {"mapped_bytes": mapped().mapped_bytes}]
    sessions = _sessions(config, loop, state, patience)
    listeners = make_listeners(config, undo)
    snapshots = Snapshots(loop.post, loop.pulse)
    metrics = _metrics(config, snapshots, undo)
    acceptors = tuple(Acceptor(loop, listener.socket, sessions.accept) for listener in listeners)
    undo.callback(_end_threads, workers, state.tiers, late)  # from here on threads use the memory
    primary = workers.get(devices.primary)
    for offset, nbytes in memory.pieces:
        primary.submit(PrepareTask(offset, nbytes))
    state.tiers.start()
    addresses = tuple(listener.address for listener in listeners)
    return Parts(state, sessions, acceptors, addresses, health, snapshots, metrics, _handlers(sessions, state, health))


def _memory(config: ServerConfig, undo: contextlib.ExitStack, late: Sequence[DeadlineError]) -> Memory:
    """The host memory, none of it touched yet. It is not closed where a thread that uses it is `late` in the end."""
    check_memory(config.memory_bytes)
    memory = Memory(config.memory_bytes)

    def close() -> None:
        if late:
            _LOG.error("the memory is kept, since it may be in use: %s", "; ".join(map(str, late)))
        else:
            memory.close()

    undo.callback(close)
    return memory


def _post(post: Callable[[Any], None], memory: Memory, item: object) -> None:
    """For threads that use the memory, which is there while one of them has this."""
    with contextlib.suppress(ServerGoneError):  # a late one tells nobody
        post(item)


def _end_threads(workers: Workers, tiers: LowerTiers, late: list[DeadlineError]) -> None:
    """Nothing is left to be done where the server has been stopped."""
    late += [*workers.stop(_STOP_S), *tiers.stop(_STOP_S)]


def _state(
    config: ServerConfig, memory: Memory, workers: Workers, post: Callable[[Any], None], undo: contextlib.ExitStack
) -> State:
    """The cache core: pool, index, leases, lower tiers."""
    pool = SlabPool()
    misses = MissLog()
    index = ChunkIndex(pool, quotas=Quotas(config.tenant_quotas), misses=misses)
    leases = LeaseTable(index, config.lease_ttl_s)
    tiers = make_tiers(config, index, pool=pool, memory_address=memory.address, post=post, undo=undo)
    largest_slot = max(nbytes for _, nbytes in memory.pieces)
    return State(
        pool, index, leases, misses, workers, tiers, largest_slot=largest_slot, verify_memory=config.verify_memory
    )


def _sessions(config: ServerConfig, loop: Loop[Any], state: State, patience: Patience) -> Sessions:
    """Who may connect, and what is done with what they send."""
    return Sessions(
        loop,
        state,
        admission=Admission(
            own_uid=os.geteuid(),
            allow_uids=config.allow_uids,
            group_id=group_id_of(config.socket_group),
            max_sessions=config.max_sessions,
            tenant_sessions=sessions_of_a_tenant(config),
        ),
        incarnation=secrets.token_bytes(16),
        tokens={} if config.token_file is None else read_tokens(config.token_file),
        patience=patience,
    )


def _metrics(config: ServerConfig, snapshots: Snapshots, undo: contextlib.ExitStack) -> MetricsServer | None:
    if config.metrics is None:
        return None
    metrics = MetricsServer(config.metrics, snapshots.take)
    undo.callback(metrics.close)
    return metrics


def _handlers(sessions: Sessions, state: State, health: Health) -> Mapping[type, Callable[[Any], None]]:
    transfers = Transfers()
    of_tiers = state.tiers.handlers()

    def on_copied(done: CopyDone) -> None:
        transfers.add("memory", done.moved)
        sessions.jobs.on_done(done)

    def on_tier_done(done: TierDone) -> None:
        transfers.add(done.tier, done.moved)
        of_tiers[TierDone](done)

    def answer(question: Question) -> None:
        question.answer.set_result(Snapshot(state.values(), health.report, transfers.metrics()))

    return {
        StageDone: sessions.jobs.on_stage,
        CopyDone: on_copied,
        FdsTaken: sessions.registrar.on_fds_taken,
        CacheOpened: sessions.registrar.on_opened,
        CacheClosed: sessions.registrar.on_closed,
        MemoryReady: lambda item: state.pool.add_area(item.offset, item.nbytes),
        **of_tiers,
        TierDone: on_tier_done,
        Question: answer,
    }
