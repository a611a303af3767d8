"""Store and retrieve: bookkeeping before and after the copies that a worker makes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cache import Chunk, ChunkState, Miss, Reservation, slot_bytes
from kvferry.errors import BlockIdError, ProtocolError, RequestError
from kvferry.protocol.messages import (
    BLOCK_ID_BYTES,
    Cancel,
    Error,
    Message,
    Progress,
    Retrieve,
    Retrieved,
    Store,
    Stored,
)
from kvferry.server.key_run import KeyRun
from kvferry.server.session import CacheState, RankCache, Session
from kvferry.server.state import State
from kvferry.server.work.tasks import CopyDone, CopyTask, Direction, Failure, StageDone

_LOG = logging.getLogger(__name__)

MAX_JOBS = 1024  # of one session, at one time
MAX_TIMEOUT_S = 600.0  # of one job: what it has reserved, or pinned, is nobody else's meanwhile
# How much of the memory the stores of one session may hold before they are whole, so that an engine whose GPU is slow,
# or hangs, leaves some to others. Not less: a prompt that takes most of the memory is kept too.
UNCOMMITTED_SHARE = 0.75
_BROKEN = ("cuda", "memory", "internal")  # failures of a copy on its way, not of what was asked for
_CUT = Failure("cut", "a chunk of the promise cannot be delivered, to this rank or another; what comes before it was")


@dataclass(frozen=True, slots=True)
class _StoreJob:
    session: Session
    cache: RankCache
    seq: int
    reservation: Reservation

    @property
    def held_bytes(self) -> int:
        return len(self.reservation.chunks) * slot_bytes(self.cache.engine.geometry.chunk_bytes)


@dataclass(frozen=True, slots=True)
class _RetrieveJob:
    session: Session
    cache: RankCache
    seq: int
    lease_id: int
    num_promised: int
    block_ids: bytes  # for all that was promised
    skip_blocks: int
    last: Chunk | None  # of what can be delivered
    before: int  # chunks of its chain that are no part of the promise

    @property
    def blocks_a_chunk(self) -> int:
        return len(self.block_ids) // BLOCK_ID_BYTES // self.num_promised


class Jobs:
    """All copies that were asked for and have not ended. A job's chunks stay reserved or pinned until it has."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._jobs: dict[int, _StoreJob | _RetrieveJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def store(self, session: Session, message: Store) -> None:
        """Reserve what is missing, and have it copied."""
        cache = self._live_cache(session, message.seq)
        geometry = cache.engine.geometry
        keys = KeyRun(message.keys)
        blocks = _check_count(message.block_ids, len(keys), geometry.chunk_tokens // geometry.block_size)
        reservation = self._state.index.reserve(
            cache.entry.space,
            keys,
            geometry.chunk_bytes,
            min(message.start_chunk, len(keys)),
            limit=self._chunks_left(session, slot_bytes(geometry.chunk_bytes)),
        )
        self._state.counters.stores += 1
        if not reservation.chunks:
            session.send(self._stored(message.seq, reservation))
            return
        job = _StoreJob(session, cache, message.seq, reservation)
        session.uncommitted_bytes += job.held_bytes
        first = reservation.first * blocks * BLOCK_ID_BYTES
        last = first + len(reservation.chunks) * blocks * BLOCK_ID_BYTES
        self._submit(
            job,
            Direction.GATHER,
            message.block_ids[first:last],
            chunks=reservation.chunks,
            message=message,
        )

    def retrieve(self, session: Session, message: Retrieve) -> None:
        """Copy the rank's share of a lease into the engine's blocks."""
        cache = self._live_cache(session, message.seq)
        geometry = cache.engine.geometry
        lease = self._state.leases.get(message.lease_id)
        if lease is None or lease.scope != cache.engine.key or cache.rank not in lease.shares:
            raise _no_share(cache)
        share, num_promised = lease.shares[cache.rank], lease.num_promised
        # An engine that came back with another layout has the same id, and must not get what the old one left.
        if share is not None and share.space != cache.entry.space:
            raise _no_share(cache)
        blocks = geometry.chunk_tokens // geometry.block_size
        block_ids = message.block_ids[: num_promised * blocks * BLOCK_ID_BYTES]
        _check_count(block_ids, num_promised, blocks)
        if message.skip_blocks > num_promised * blocks:
            raise BlockIdError(f"{message.skip_blocks} blocks to skip of {num_promised * blocks}")
        self._state.counters.retrieves += 1
        job = _RetrieveJob(
            session,
            cache,
            message.seq,
            message.lease_id,
            num_promised,
            block_ids,
            message.skip_blocks,
            share,
            lease.before,
        )
        if share is None:
            session.send(self._answer_retrieve(job, 0, None))
            return
        self._state.index.pin(share)
        chunks = share.chain()[lease.before :]
        here = block_ids[: len(chunks) * blocks * BLOCK_ID_BYTES]
        self._submit(job, Direction.SCATTER, here, chunks=chunks, message=message)

    def cancel(self, session: Session, message: Cancel) -> None:
        """Stop a job; its own reply says when. One that has ended is no error."""
        job_id = session.jobs.get(message.job)
        if job_id is not None:
            self._jobs[job_id].cache.worker.cancel(job_id)

    def on_stage(self, done: StageDone) -> None:
        """Tell the client how far its retrieve has come; not where it is known by now that some of it cannot come."""
        job = self._jobs.get(done.job_id)
        if not isinstance(job, _RetrieveJob):
            return
        assert job.last is not None
        lease = self._state.leases.get(job.lease_id)
        num_left = job.num_promised if lease is None else lease.num_chunks
        if min(num_left, job.last.depth - job.before) == job.num_promised:
            job.session.send(Progress(job.seq, done.stages))

    def on_done(self, done: CopyDone) -> None:
        """A copy has ended: publish or drop what it wrote, unpin what it read, and tell the client."""
        job = self._jobs.pop(done.job_id)
        job.cache.worker.settle(done.job_id)
        job.session.jobs.pop(job.seq, None)
        if isinstance(job, _StoreJob):
            job.session.send(self._end_store(job, done))
        else:
            job.session.send(self._end_retrieve(job, done))

    def _end_store(self, job: _StoreJob, done: CopyDone) -> Message:
        counters, chunks = self._state.counters, job.reservation.chunks
        job.session.uncommitted_bytes -= job.held_bytes
        if done.failure is not None:
            self._state.index.abort(chunks)
            counters.stores_failed += 1
            return Error(job.seq, done.failure.code, done.failure.text)
        counters.bytes_stored += len(chunks) * job.cache.engine.geometry.chunk_bytes
        if done.digests:
            for chunk, digest in zip(chunks, done.digests, strict=True):
                chunk.digest = digest
        tiers = self._state.tiers
        tiers.on_stored(self._state.index.commit(chunks, dirty=tiers.exist))
        return self._stored(job.seq, job.reservation)

    def _end_retrieve(self, job: _RetrieveJob, done: CopyDone) -> Message:
        assert job.last is not None
        self._state.counters.bytes_retrieved += done.num_chunks * job.cache.engine.geometry.chunk_bytes
        if done.failure is not None and done.damaged is not None:
            self._lose(job.last.at_depth(job.before + done.damaged + 1), done.failure)
        if done.failure is not None and (done.damaged is not None or done.failure.code in _BROKEN):
            self._state.leases.cut(job.lease_id, done.num_chunks)
        self._state.index.unpin(job.last)
        return self._answer_retrieve(job, done.num_chunks, done.failure)

    def _stored(self, seq: int, reservation: Reservation) -> Stored:
        """Only what can be looked up by now is stored or present; all the rest was skipped."""
        num_stored, num_present = reservation.num_stored, reservation.num_present
        self._state.index.counters.skipped_unsure += reservation.num_unsure
        num_asked = len(reservation.chunks) + reservation.num_there + reservation.num_skipped
        return Stored(seq, num_stored, num_present, num_asked - num_stored - num_present)

    def _answer_retrieve(self, job: _RetrieveJob, num_good: int, failure: Failure | None) -> Message:
        """What to tell a client whose first `num_good` chunks are in place: all is well, or which blocks failed.

        What another rank has not got counts as failed here, too, so that all ranks go by the same length.
        """
        lease = self._state.leases.get(job.lease_id)
        if lease is not None:
            num_good = min(num_good, lease.num_chunks)
        failed = job.block_ids[max(job.skip_blocks, num_good * job.blocks_a_chunk) * BLOCK_ID_BYTES :]
        if failure is None and not failed:
            self._state.leases.take(job.lease_id, job.cache.rank)
            return Retrieved(job.seq, num_good)
        self._state.counters.retrieves_failed += 1
        failure = failure or _CUT
        return Error(job.seq, failure.code, failure.text, failed)

    def _lose(self, chunk: Chunk, failure: Failure) -> None:
        """Forget a chunk whose bytes are not those that were stored, and all promises of it."""
        if chunk.state is not ChunkState.GONE:
            self._state.counters.chunks_damaged += 1
            _LOG.error("%r: %s", chunk, failure.text)
        self._state.index.discard(chunk, Miss.INTEGRITY)
        self._state.leases.lose(chunk)

    def _chunks_left(self, session: Session, slot: int) -> int:
        """How many chunks more the session may hold uncommitted; at least one where it holds none."""
        left = int(self._state.pool.capacity_bytes * UNCOMMITTED_SHARE) - session.uncommitted_bytes
        return max(left // slot, 0 if session.uncommitted_bytes else 1)

    def _submit(
        self,
        job: _StoreJob | _RetrieveJob,
        direction: Direction,
        block_ids: bytes,
        *,
        chunks: Sequence[Chunk],
        message: Store | Retrieve,
    ) -> None:
        job_id = next(self._state.ids)
        task = CopyTask(
            cache_id=job.cache.cache_id,
            job_id=job_id,
            direction=direction,
            block_ids=block_ids,
            offsets=tuple(chunk.offset for chunk in chunks),
            skip_blocks=min(job.skip_blocks, len(block_ids) // BLOCK_ID_BYTES) if isinstance(job, _RetrieveJob) else 0,
            ticket=message.ticket,
            deadline=time.monotonic() + min(message.timeout_s, MAX_TIMEOUT_S),
            digests=tuple(chunk.digest for chunk in chunks) if self._state.verify_memory else None,
            stages=message.stages if isinstance(message, Retrieve) else 1,
        )
        self._jobs[job_id] = job
        job.session.jobs[job.seq] = job_id
        job.cache.worker.submit(task)

    @staticmethod
    def _live_cache(session: Session, seq: int) -> RankCache:
        """The session's cache, where it may take one more job."""
        cache = session.cache
        if cache is None or cache.state is not CacheState.LIVE:
            raise RequestError("register", "no KV cache is registered by this session")
        if seq in session.jobs:
            raise ProtocolError(f"job {seq} is still going on; each needs a seq of its own")
        if len(session.jobs) >= MAX_JOBS:
            raise RequestError("busy", f"{MAX_JOBS} jobs of this session are going on; wait for some of them")
        return cache


def _check_count(block_ids: bytes, num_chunks: int, blocks_a_chunk: int) -> int:
    """`blocks_a_chunk`; raises BlockIdError unless the ids cover exactly so many chunks."""
    if len(block_ids) != num_chunks * blocks_a_chunk * BLOCK_ID_BYTES:
        raise BlockIdError(
            f"{len(block_ids) / BLOCK_ID_BYTES:g} block ids for {num_chunks} chunks of {blocks_a_chunk} blocks"
        )
    return blocks_a_chunk


def _no_share(cache: RankCache) -> RequestError:
    return RequestError("lease", f"no share of rank {cache.rank} under that lease: taken, released or overdue")
