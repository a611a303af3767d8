"""What an engine calls: register, look up, store, retrieve."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.client.jobs import Job, RetrieveResult, StoreResult, int32_ids, start_job
from kvferry.client.keys import RequestKeys
from kvferry.client.link import Link
from kvferry.client.registration import RankName, Registration, register, unregister
from kvferry.client.storages import prepare_storages
from kvferry.client.url import parse_url
from kvferry.errors import BlockIdError, KVFerryError
from kvferry.ipc.policy import IPCPolicy
from kvferry.layout import KeyContext, LayoutHints, chain_hashes, chunk_tokens_for
from kvferry.protocol import messages
from kvferry.protocol.messages import Attached, Found, Pong, Retrieved, StatsReply, Stored

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from typing_extensions import Self

_NO_CONTEXT = KeyContext()
_DEFAULT_POLICY = IPCPolicy()
_JOB_S = 60.0


class Lookup(NamedTuple):
    """`tokens` at the start of the prompt are promised under `lease_id`, which is 0 where there are none."""

    tokens: int
    lease_id: int


class CacheClient:
    """An engine's (or its scheduler's) connection to a cache server.

    A worker registers its rank's KV cache, then stores and retrieves; a scheduler attaches, then looks up. Every call
    may come from any thread, and waits at most `timeout_s` for the server; jobs have time limits of their own. A forked
    child cannot use its parent's client: its copy of the socket is closed there, and calls raise ServerGoneError.

    `url` is "unix:///path/to/socket", or the path itself. Raises ServerGoneError where no server answers there,
    RequestError where it refuses this process.
    """

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        self._closed = True
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}; the server needs some time to answer")
        self._timeout_s = timeout_s
        self._link = Link(parse_url(url), timeout_s)
        self._closed = False
        self._lock = threading.Lock()  # guards the fields below; never held over a call
        self._keys = RequestKeys()
        self._registration: Registration | None = None
        self._registering = False
        self._engine_id: str | None = None
        self._chunk_tokens = 0

    @property
    def incarnation(self) -> bytes:
        """Random bytes that are new with every start of the server."""
        return self._link.incarnation

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one chunk; 0 until it is known."""
        return self._chunk_tokens

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        engine_id: str,
        model: str,
        format: str,
        rank: int = 0,
        world_size: int = 1,
        hints: Mapping[str, Any] | LayoutHints | None = None,
        policy: IPCPolicy | None = None,
    ) -> None:
        """Share this rank's KV cache with the server; call it before the first forward.

        The first 64 bytes of each storage are overwritten for a moment and come back, which proves that the server maps
        this very memory. CPU tensors in ordinary memory are moved to shareable memory, in place.

        Parameters
        ----------
        kv_caches
            The tensors by layer, in the order of the layers, all on one device.
        model
            What the KV is of; engines that give the same name share it, so name the weights, not only the family.
        format
            How the engine lays out its tensors; the names are the keys of `kvferry.layout.FORMATS`.

        Raises LayoutError where the tensors are not what `format` and `hints` say, ShareError where they cannot be
        shared or the server sees other memory, RequestError where the server refuses.
        """
        policy = policy or _DEFAULT_POLICY
        with self._exclusive_registration():
            storages = prepare_storages(kv_caches, format=format, hints=hints, policy=policy)
            name = RankName(engine_id, model, rank, world_size, chunk_tokens_for(storages.layout.block_size))
            registration = register(
                self._link, name, storages, isolated_ipc=policy.isolated_ipc, timeout_s=self._timeout_s
            )
            with self._lock:
                self._registration = registration
                self._engine_id, self._chunk_tokens = engine_id, name.chunk_tokens

    def unregister(self) -> None:
        """Take the KV cache back: its jobs are cancelled, and the server has unmapped it on return. Idempotent."""
        with self._lock:
            registration = self._registration
        if registration is None:
            return
        unregister(self._link, self._timeout_s)
        registration.close()  # where that fails, another call can try again
        with self._lock:
            if self._registration is registration:
                self._registration, self._engine_id, self._chunk_tokens = None, None, 0

    def attach(self, engine_id: str) -> bool:
        """Look up for an engine whose workers register elsewhere; whether all its ranks are there yet.

        Until they are, lookups give 0 tokens.
        """
        attached = self._link.call(lambda seq: messages.Attach(seq, engine_id), Attached, self._timeout_s)
        with self._lock:
            self._engine_id = engine_id
            self._chunk_tokens = attached.chunk_tokens
        return attached.ready

    def lookup(self, request_id: str, tokens: Any, *, context: KeyContext = _NO_CONTEXT) -> Lookup:
        """How many tokens at the start of `tokens` every rank can retrieve; they are kept for this request.

        Asking again for the same request gives the same lease, or a new one in its place where more is there now. The
        lease ends when all ranks have retrieved, by `release`, with this client, or when it is overdue. `tokens` are
        token ids: a list, array, NumPy array or CPU tensor; ids outside int32 raise ValueError.
        """
        if not self._ready_for_lookup():
            return Lookup(0, 0)
        with self._lock:
            chunk_tokens = self._chunk_tokens
            keys = self._keys.keys(request_id, tokens, chunk_tokens, context)
        if not keys:
            return Lookup(0, 0)
        found = self._link.call(lambda seq: messages.Lookup(seq, request_id, keys), Found, self._timeout_s)
        if found.chunk_tokens not in (0, chunk_tokens):  # the engine came back with other blocks
            with self._lock:
                self._chunk_tokens = found.chunk_tokens
            return self.lookup(request_id, tokens, context=context)
        return Lookup(found.tokens, found.lease_id)

    def release(self, lease_id: int) -> None:
        """Give a lookup's promise back. Idempotent; does not wait for the server."""
        if lease_id:
            self._link.send(messages.Release(lease_id), self._timeout_s)

    def end_request(self, request_id: str) -> None:
        """Forget what is remembered of a request's tokens; saves memory only, which is bounded without. Idempotent."""
        with self._lock:
            self._keys.forget(request_id)

    def store(
        self,
        tokens: Any,
        block_ids: Sequence[int],
        start_token: int = 0,
        *,
        context: KeyContext = _NO_CONTEXT,
        stream: int | None = None,
        timeout_s: float = _JOB_S,
    ) -> Job[StoreResult]:
        """Keep the KV of the whole chunks of `tokens`, from the chunk that holds `start_token` on.

        `block_ids` are the blocks of `tokens`, from token 0 on. The server reads once the work that `stream` (a CUDA
        stream's handle; None: torch's current one) has now is done; until the job is done the blocks must not be
        written to. Without room the server skips, which is no error.
        """
        registration = self._registered()
        keys = chain_hashes(tokens, registration.name.chunk_tokens, context)
        needed = len(keys) // messages.KEY_BYTES * registration.blocks_a_chunk
        if len(block_ids) < needed:
            raise BlockIdError(f"{len(block_ids)} block ids, the whole chunks take {needed}; give all from token 0")
        ids = int32_ids(block_ids)[:needed]
        start = start_token // registration.name.chunk_tokens

        job = Job[StoreResult](ids.tolist(), Stored)
        start_job(
            job,
            self._link,
            registration,
            make=lambda seq, ticket: messages.Store(seq, keys, start, ids.tobytes(), ticket, timeout_s),
            stream=stream,
            timeout_s=self._timeout_s,
        )
        return job

    def retrieve(
        self,
        lease_id: int,
        block_ids: Sequence[int],
        skip_tokens: int = 0,
        *,
        stream: int | None = None,
        timeout_s: float = _JOB_S,
    ) -> Job[RetrieveResult]:
        """Fill blocks with what a lookup promised; each rank takes its share once.

        `block_ids` are the blocks of the promised tokens, from token 0 on; more are left alone. The blocks of the first
        `skip_tokens` (whole blocks) are left alone too. The server writes once the work that `stream` has now is done.
        Until the job is done, or `cancel` has returned, bytes may land in the blocks. Where it fails,
        `failed_block_ids` tells which hold nothing.
        """
        registration = self._registered()
        block_size = registration.storages.layout.block_size
        skip, rest = divmod(skip_tokens, block_size)
        if rest or skip < 0:
            raise BlockIdError(f"skip_tokens is {skip_tokens}; only whole blocks of {block_size} tokens can be skipped")
        ids = int32_ids(block_ids)

        job = Job[RetrieveResult](ids[skip:].tolist(), Retrieved)
        start_job(
            job,
            self._link,
            registration,
            make=lambda seq, ticket: messages.Retrieve(seq, lease_id, ids.tobytes(), skip, ticket, timeout_s),
            stream=stream,
            timeout_s=self._timeout_s,
        )
        return job

    def stats(self) -> dict[str, float]:
        """The server's counters and gauges by name."""
        return self._link.call(messages.Stats, StatsReply, self._timeout_s).values

    def ping(self) -> None:
        """Return when the server has answered."""
        self._link.call(messages.Ping, Pong, self._timeout_s)

    def close(self) -> None:
        """Unregister, and hang up. Idempotent; never raises for a server that is gone."""
        if self._closed:
            return
        self._closed = True
        if self._link.usable:
            with contextlib.suppress(KVFerryError):  # a server that is gone, or gone wrong, is told by hanging up
                self.unregister()
        stopped = self._link.close(self._timeout_s)
        if stopped and self._registration is not None:  # else the server may still copy: what is shared stays
            self._registration.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._link.usable else "cut off"
        return f"<CacheClient of engine {self._engine_id!r}, {state}>"

    def __del__(self) -> None:
        if not self._closed and self._link.usable:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1, source=self)
            self._link.close(0.0)

    @contextlib.contextmanager
    def _exclusive_registration(self) -> Iterator[None]:
        """One registration at a time, and none where there is one."""
        with self._lock:
            if self._registering or self._registration is not None:
                raise ValueError("this client has KV caches registered; unregister() first, or use another client")
            self._registering = True
        try:
            yield
        finally:
            self._registering = False

    def _registered(self) -> Registration:
        with self._lock:
            registration = self._registration
        if registration is None:
            raise ValueError("no KV caches are registered; call register_kv_caches() first")
        return registration

    def _ready_for_lookup(self) -> bool:
        """Whether the engine's chunk size is known; asks the server again while it is not."""
        if self._engine_id is None:
            raise ValueError("no engine to look up for; call register_kv_caches() or attach() first")
        return self._chunk_tokens > 0 or self.attach(self._engine_id)
