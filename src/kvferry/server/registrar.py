"""Registrations: a rank's KV cache on its way in (descriptors, proof) and on its way out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from kvferry.errors import ProtocolError, RequestError
from kvferry.protocol.framing import Frame
from kvferry.protocol.messages import (
    Confirm,
    Error,
    FdAck,
    FdBatch,
    Proof,
    Register,
    Registered,
    Request,
    Unregister,
    Unregistered,
)
from kvferry.server.engines import Engine
from kvferry.server.session import CacheState, RankCache, Session
from kvferry.server.session_log import SessionLog
from kvferry.server.state import State
from kvferry.server.work.tasks import CacheClosed, CacheOpened, CloseTask, FdsTaken, FdsTask, OpenTask

_LOG = logging.getLogger(__name__)


class Registrar:
    """Moves registrations through their states. `on_closed(session)` is called when a session's cache is unmapped."""

    def __init__(self, state: State, on_closed: Callable[[Session], None], *, log: SessionLog) -> None:
        self._state = state
        self._log = log
        self._on_closed = on_closed
        self._caches: dict[int, RankCache] = {}
        state.more_values.append(self.values)

    def __len__(self) -> int:
        return len(self._caches)

    def values(self) -> dict[str, float]:
        """How many bytes of KV caches are held of each device, from their registration until they are unmapped."""
        held: dict[str, float] = {}
        for cache in self._caches.values():
            name = f"held_bytes_{cache.worker.name}"
            held[name] = held.get(name, 0) + cache.nbytes
        return held

    def held_bytes(self, session: Session) -> int:
        """How many bytes of KV caches the session has given that are not unmapped yet."""
        return sum(self._caches[cache_id].nbytes for cache_id in session.caches)

    def register(self, session: Session, message: Register) -> None:
        """Claim the rank, and have the device's worker open the cache."""
        try:
            self._check(session, message)
            worker = self._state.workers.get(message.device_uuid)
            cache_id = next(self._state.ids)
            engine = self._state.engines.claim(session.tenant, message, cache_id)
        except RequestError as error:
            self._state.refusals.count_registration(error.code)
            self._log.refused_cache(session, (message.engine_id, message.rank), error.code, str(error))
            raise
        self._warn_if_too_large(engine)
        num_fds = message.num_fds + message.num_event_fds
        nbytes = message.layout.num_blocks * message.layout.block_bytes
        cache = RankCache(cache_id, session, engine, message.rank, worker, nbytes, message.seq, num_fds)
        self._caches[cache_id] = cache
        session.cache = cache
        session.caches.add(cache_id)
        worker.submit(
            OpenTask(
                cache_id,
                message.layout,
                message.device_uuid,
                message.wrappers,
                message.num_fds,
                message.events,
                message.num_event_fds,
                message.probes,
            )
        )

    def _check(self, session: Session, message: Register) -> None:
        """Raise RequestError where this session may not register that."""
        if session.cache is not None:
            raise RequestError("registered", "this session has a KV cache already; unregister it first")
        if session.engine_id not in (None, message.engine_id):
            raise RequestError("attach", f"this session looks up for engine {session.engine_id!r} and stays with it")
        if session.greeting.remote and (message.num_fds or message.num_event_fds):
            raise RequestError(
                "transport",
                f"{message.num_fds} file descriptors for memory and {message.num_event_fds} for events would have to "
                "come with this KV cache, and TCP carries none. Over TCP give memory of cudaMalloc by raw handles, "
                "IPCPolicy('raw'); for virtual memory (vmm) and host memory use the server's Unix socket",
            )

    def take_fds(self, session: Session, frame: Frame[Request]) -> None:
        """Hand descriptors on to the worker; owns them."""
        cache = session.cache
        sent = 0 if cache is None else cache.fds_sent + len(frame.fds)
        if (
            not isinstance(frame.message, FdBatch)
            or cache is None
            or cache.state is not CacheState.OPENING
            or cache.fds_sent != cache.fds_taken
            or sent > cache.num_fds
        ):
            for fd in frame.fds:
                os.close(fd)
            raise ProtocolError(f"{len(frame.fds)} file descriptors came that no registration is waiting for")
        cache.fds_sent = sent
        cache.worker.submit(FdsTask(cache.cache_id, frame.fds))

    def confirm(self, session: Session, message: Confirm) -> None:
        """The client has found its own nonces: the rank is live."""
        cache = session.cache
        if cache is None or cache.state is not CacheState.PROVEN or cache.seq != message.seq:
            raise ProtocolError("a registration was confirmed that is not waiting for it")
        cache.state = CacheState.LIVE
        cache.entry.live = True
        session.engine_id = cache.engine.key[1]
        self._state.counters.registrations += 1
        self._log.registered(session, cache)
        session.send(Registered(message.seq))

    def unregister(self, session: Session, message: Unregister) -> None:
        """Drop the session's cache; answered when it is unmapped, at once where there is none."""
        cache = session.cache or session.leaving
        if cache is None:
            session.send(Unregistered(message.seq))
            return
        cache.unregister_seqs.append(message.seq)
        session.engine_id = None
        if session.cache is not None:
            self.close(session)
        elif cache.cache_id not in self._caches:  # it was not unmapped in time: look again
            self._begin_to_close(cache)

    def close(self, session: Session) -> None:
        """Begin to drop the session's cache: its rank is free at once, its memory as soon as no copy uses it."""
        cache, session.cache = session.cache, None
        if cache is None:
            return
        cache.state = CacheState.CLOSING
        session.leaving = cache
        self._state.engines.drop(cache.engine, cache.rank)
        self._begin_to_close(cache)

    def _begin_to_close(self, cache: RankCache) -> None:
        self._caches[cache.cache_id] = cache
        cache.session.caches.add(cache.cache_id)
        cache.worker.submit(CloseTask(cache.cache_id))

    def _warn_if_too_large(self, engine: Engine) -> None:
        need = engine.geometry.chunk_bytes
        if need > self._state.largest_slot:
            _LOG.warning(
                "engine %r: a chunk has %d bytes, the memory holds pieces of %d at most: nothing of it will be kept",
                engine.key[1],
                need,
                self._state.largest_slot,
            )

    def on_fds_taken(self, done: FdsTaken) -> None:
        """The worker has imported a batch: let the next one come."""
        cache = self._caches[done.cache_id]
        cache.fds_taken = done.received
        if cache.state is CacheState.OPENING:
            cache.session.send(FdAck(cache.seq, done.received))

    def on_opened(self, done: CacheOpened) -> None:
        """The worker has opened the cache, or could not."""
        cache = self._caches[done.cache_id]
        if cache.state is not CacheState.OPENING:
            return  # dropped meanwhile; its CacheClosed is to come
        if done.failure is None:
            cache.state = CacheState.PROVEN
            cache.session.send(Proof(cache.seq, done.nonces))
            return
        self._state.refusals.count_registration(done.failure.code)
        self._log.refused_cache(cache.session, (cache.engine.key[1], cache.rank), done.failure.code, done.failure.text)
        cache.session.send(Error(cache.seq, done.failure.code, done.failure.text))
        self.close(cache.session)

    def on_closed(self, done: CacheClosed) -> None:
        """Nothing of the cache is mapped any more, or the client is told that it may be; a session that ends, ends."""
        cache = self._caches.pop(done.cache_id)
        session, failure = cache.session, done.failure
        session.caches.discard(done.cache_id)
        if failure is not None:
            session.end_text += f" ({failure.text})" if session.ended else ""
            self._log.still_mapped(session)
        elif session.leaving is cache:
            session.leaving = None
        for seq in cache.unregister_seqs:
            session.send(Unregistered(seq) if failure is None else Error(seq, failure.code, failure.text))
        cache.unregister_seqs.clear()
        self._on_closed(session)
