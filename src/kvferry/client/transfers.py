"""Starting stores and retrieves: what is sent for them, after an event on the engine's stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvferry.client.connection import Connection
from kvferry.client.jobs import Job, RetrieveResult, StoreResult
from kvferry.client.link import Link
from kvferry.client.presence import Presence
from kvferry.client.registration import Registration
from kvferry.client.waiting import Answer
from kvferry.errors import BlockIdError, KVFerryError, ServerGoneError
from kvferry.ipc.events import Ticket
from kvferry.protocol.messages import KEY_BYTES, MAX_STAGES, Cancel, Message, Retrieve, Retrieved, Store, Stored

_Make = Callable[[int, Ticket], Message]


class Transfers:
    """Starts the jobs of one client. Any thread may; where there is no server a job has failed from the start."""

    def __init__(self, connection: Connection, presence: Presence, timeout_s: float) -> None:
        self._connection = connection
        self._presence = presence
        self._timeout_s = timeout_s

    def store(
        self,
        keys_of: Callable[[int], bytes],
        block_ids: Sequence[int],
        *,
        start_token: int,
        stream: int | None,
        timeout_s: float,
    ) -> Job[StoreResult]:
        """See `CacheClient.store`; `keys_of(chunk_tokens)` are the keys of all whole chunks."""
        registration = self._registered()
        chunk_tokens = registration.name.chunk_tokens
        keys = keys_of(chunk_tokens)
        needed = len(keys) // KEY_BYTES * registration.blocks_a_chunk
        if len(block_ids) < needed:
            raise BlockIdError(f"{len(block_ids)} block ids, the whole chunks take {needed}; give all from token 0")
        ids = int32_ids(block_ids)[:needed]
        start = start_token // chunk_tokens
        job = Job[StoreResult](ids.tolist(), Stored)
        self._start(
            job, registration, lambda seq, ticket: Store(seq, keys, start, ids.tobytes(), ticket, timeout_s), stream
        )
        return job

    def retrieve(
        self,
        lease_id: int,
        block_ids: Sequence[int],
        *,
        skip_tokens: int,
        stream: int | None,
        timeout_s: float,
        stages: int,
    ) -> Job[RetrieveResult]:
        """See `CacheClient.retrieve`."""
        registration = self._registered()
        layout = registration.storages.layout
        block_size = layout.block_size
        skip, rest = divmod(skip_tokens, block_size)
        if rest or skip < 0:
            raise BlockIdError(f"skip_tokens is {skip_tokens}; only whole blocks of {block_size} tokens can be skipped")
        if stages < 1:
            raise ValueError(f"a retrieve in {stages} stages; it has at least one")
        stages = min(stages, len(layout.planes), MAX_STAGES)
        ids = int32_ids(block_ids)
        job = Job[RetrieveResult](ids[skip:].tolist(), Retrieved, stages=stages)
        self._start(
            job,
            registration,
            lambda seq, ticket: Retrieve(seq, lease_id, ids.tobytes(), skip, ticket, timeout_s, stages),
            stream,
        )
        return job

    def _registered(self) -> Registration:
        self._connection.check()
        registration = self._presence.registration
        if registration is None:
            raise ValueError("no KV caches are registered; call register_kv_caches() first")
        return registration

    def _start(
        self, job: Job[StoreResult] | Job[RetrieveResult], registration: Registration, make: _Make, stream: int | None
    ) -> None:
        link = self._connection.link()
        if link is None:
            job.end(self._connection.gone())
            return
        device = registration.storages.device
        if stream is None and device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
        ticket = registration.ring.record(stream, self._timeout_s)

        def release() -> None:
            """Also where the server may still wait for it: a later event in its place comes only after this one."""
            registration.ring.release(ticket)

        def on_answer(answer: Answer) -> None:
            try:
                release()
            finally:
                job.end(answer)

        try:
            seq = link.expect(on_answer, release, job.advance)
            job.bind(lambda: link.send(Cancel(seq), self._timeout_s))
            self._send(link, seq, make(seq, ticket))
        except ServerGoneError as error:  # before all of the request was sent: nothing will come of it
            on_answer(error)
        except (KVFerryError, ValueError):
            release()
            raise

    def _send(self, link: Link, seq: int, message: Message) -> None:
        try:
            link.send(message, self._timeout_s)
        except (KVFerryError, ValueError):
            link.forget(seq)
            raise


def int32_ids(block_ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """Block ids as they travel. Raises BlockIdError for what is no list of int32."""
    ids = np.asarray(block_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise BlockIdError(f"block ids are {ids.dtype} of {ids.ndim} axes; give one axis of integers")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int32).max):
        raise BlockIdError(f"block ids from {ids.min()} to {ids.max()}; they start at 0 and fit into int32")
    return ids.astype("<i4")
