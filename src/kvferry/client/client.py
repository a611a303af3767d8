"""What an engine calls: register, look up, store, retrieve."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvferry.client.connection import Connection
from kvferry.client.jobs import Job, RetrieveResult, StoreResult
from kvferry.client.link import Link
from kvferry.client.lookups import Lookup, Lookups, Prefetch
from kvferry.client.presence import Presence
from kvferry.client.registration import RankName, Registration, check_name
from kvferry.client.storages import describe_storages, wrap_storages
from kvferry.client.transfers import Transfers
from kvferry.client.url import TcpAddress, parse_url
from kvferry.errors import DeadlineError, ServerGoneError
from kvferry.ipc.policy import IPCPolicy
from kvferry.layout import KeyContext, LayoutHints, chunk_tokens_for
from kvferry.protocol import messages
from kvferry.protocol.auth import Token
from kvferry.protocol.messages import Message, Pong, StatsReply

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

_NO_CONTEXT = KeyContext()
_DEFAULT_POLICY = IPCPolicy()
_JOB_S = 60.0
_R = TypeVar("_R", bound=Message)


class CacheClient:
    """An engine's (or its scheduler's) connection to a cache server.

    A worker registers its rank's KV cache, then stores and retrieves; a scheduler attaches, then looks up. Every call
    may come from any thread, and waits at most `timeout_s` for the server; jobs have time limits of their own. A forked
    child cannot use its parent's client: its copy of the socket is closed there, and calls raise ServerGoneError.

    An engine outlives its server. While that is gone lookups are misses, and jobs fail at once; `stats`, `ping`,
    `attach` and `clear` raise ServerGoneError. A thread tries to connect until there is a server again, which is then
    given what was registered, and hits come back. Leases of before are void. Jobs that were going on fail once the old
    server can no longer touch their blocks.

    Parameters
    ----------
    url
        "unix:///path/to/socket", or the path itself, or "tcp://host:port", where `isolated_ipc` is implied, and KV
        caches have to be memory of cudaMalloc.
    token
        For servers that want one: "name:secret".
    required
        Whether a server has to answer now. Raises ServerGoneError where none does, RequestError where it refuses this
        process; otherwise the client begins cut off.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 10.0, token: Token | str | None = None, required: bool = True
    ) -> None:
        self._closed = True
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}; the server needs some time to answer")
        address = parse_url(url)
        if isinstance(token, str):
            token = Token.parse(token)
        self._remote = isinstance(address, TcpAddress)
        self._timeout_s = timeout_s
        self._presence = Presence(timeout_s)
        self._connection = Connection(
            lambda timeout_s, on_end: Link(address, timeout_s, token=token, on_end=on_end),
            self._presence.introduce,
            timeout_s=timeout_s,
            required=required,
        )
        self._lookups = Lookups(self._connection, self._presence, timeout_s)
        self._transfers = Transfers(self._connection, self._presence, timeout_s)
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a server now, and it knows what was registered."""
        return self._connection.connected

    @property
    def congested(self) -> bool:
        """Whether a call would have to wait even to be sent, since the server does not read; False without one."""
        return self._connection.congested

    @property
    def incarnation(self) -> bytes:
        """Random bytes that are new with every start of the server; those of the last one while there is none."""
        return self._connection.incarnation

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one chunk; 0 until it is known."""
        return self._presence.chunk_tokens

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        engine_id: str,
        model: str,
        format: str,
        rank: int = 0,
        world_size: int = 1,
        chunk_tokens: int = 0,
        hints: Mapping[str, Any] | LayoutHints | None = None,
        policy: IPCPolicy | None = None,
    ) -> None:
        """Share this rank's KV cache with the server; call it before the first forward.

        The first 64 bytes of each storage are overwritten for a moment and come back, which proves that the server maps
        this very memory; a server that comes later only reads. CPU tensors in ordinary memory are moved to shareable
        memory, in place. Idempotent for the same tensors under the same names.
        Parameters
        ----------
        kv_caches
            The tensors by layer, in the order of the layers, all on one device.
        model
            What the KV is of; engines that give the same name share it, so name the weights, not only the family.
        format
            How the engine lays out its tensors; the names are the keys of `kvferry.layout.FORMATS`.
        chunk_tokens
            What is kept, and found, at a time: whole blocks. 0: the smallest number of them that has 64 tokens.

        Raises LayoutError where the tensors are not what `format` and `hints` say, ShareError where they cannot be
        shared or the server sees other memory, RequestError where the server refuses.
        """
        policy = policy or _DEFAULT_POLICY
        with self._connection.exclusive(interrupt=True) as link:
            layout, flats = describe_storages(kv_caches, format=format, hints=hints, policy=policy)
            name = RankName(engine_id, model, rank, world_size, chunk_tokens or chunk_tokens_for(layout.block_size))
            if self._presence.has(name, layout, flats):
                return
            storages = wrap_storages(layout, flats, policy)
            registration = Registration.make(name, storages, isolated_ipc=policy.isolated_ipc, remote=self._remote)
            try:
                self._presence.register(link, registration)
                self._connection.check()  # after a close in between nobody else would do it
            except BaseException:
                registration.close()
                raise

    def unregister(self) -> None:
        """Take the KV cache back: its jobs are cancelled, and the server has unmapped it on return. Idempotent.

        Raises DeadlineError where the server has not said so in time; another call can try again.
        """
        if self._closed:
            return
        with self._connection.exclusive(interrupt=True) as link:
            registration = self._presence.registration
            if registration is None:
                return
            self._presence.unregister(link)
            if not self._connection.settle(self._timeout_s):
                raise DeadlineError(f"a server that hung up has not ended its copies within {self._timeout_s:g} s")
            registration.close()
            self._presence.forget()

    def attach(self, engine_id: str) -> bool:
        """Look up for an engine whose workers register elsewhere; whether all its ranks are there yet.

        Until they are, lookups give 0 tokens. Where it raises ServerGoneError the engine is remembered all the same.
        """
        check_name("engine_id", engine_id)
        with self._connection.exclusive(interrupt=False) as link:
            if link is None:
                self._presence.attach_later(engine_id)
                raise self._connection.gone()
            return self._presence.attach(link, engine_id)

    def lookup(self, request_id: str, tokens: Any, *, context: KeyContext = _NO_CONTEXT, wait_s: float = 0.0) -> Lookup:
        """How many tokens at the start of `tokens` every rank can retrieve; they are kept for this request.

        What only the server's lower tiers have begins to be loaded; the answer waits for that, up to `wait_s`. Asking
        again for the same request gives the same lease, or a new one in its place where more is there now. The lease
        ends when all ranks have retrieved, by `release`, with this client, or when it is overdue. `tokens` are token
        ids: a list, array, NumPy array or CPU tensor; ids outside int32 raise ValueError. Or `ChunkKeys`, the engine's
        own; these may go on where a chain is known already, of which what is in memory is found.
        DeadlineError: the server lives, and did not answer in time. Take it for a miss, and leave it alone for a while.
        """
        return self._lookups.lookup(request_id, tokens, context, wait_s=wait_s)

    def prefetch(self, tokens: Any, *, context: KeyContext = _NO_CONTEXT) -> Prefetch:
        """Have what lower tiers hold of `tokens` loaded into the server's memory; promises nothing."""
        return self._lookups.prefetch(tokens, context)

    def clear(self, tokens: Any = None, *, context: KeyContext = _NO_CONTEXT) -> int:
        """Forget what is stored of `tokens`, and of all prompts that begin like their first chunk; without, everything.

        That is for all engines of this tenant, model and layout, in all tiers of this server and in the shared bucket
        (which forgets all of the model), not in other hosts' own tiers. How many chunks, of all ranks, were in memory.
        What a lease has promised is delivered still. Waits for the deletions; RequestError with code "tier" says that
        some may not have been done, so that what is out of use here may come back.
        """
        return self._lookups.clear(tokens, context)

    def release(self, lease_id: int) -> None:
        """Give a lookup's promise back. Idempotent; does not wait for the server."""
        if not lease_id or self._closed:
            return
        link = self._connection.link()
        if link is not None:
            try:
                link.send(messages.Release(lease_id), self._timeout_s)
            except ServerGoneError:
                return  # and the lease with it

    def end_request(self, request_id: str) -> None:
        """Forget what is remembered of a request's tokens; saves memory only, which is bounded without. Idempotent."""
        self._lookups.forget(request_id)

    def store(
        self,
        tokens: Any,
        block_ids: Sequence[int],
        start_token: int = 0,
        *,
        context: KeyContext = _NO_CONTEXT,
        request_id: str | None = None,
        stream: int | None = None,
        timeout_s: float = _JOB_S,
    ) -> Job[StoreResult]:
        """Keep the KV of the whole chunks of `tokens`, from the chunk that holds `start_token` on.

        `block_ids` are the blocks of `tokens`, from the first on. The server reads once the work that `stream` (a CUDA
        stream's handle; None: torch's current one) has now is done; until the job is done the blocks must not be
        written to. Without room the server skips, which is no error. With the `request_id` of a lookup, its tokens are
        not hashed again.
        """
        keys_of = partial(self._lookups.keys, request_id, tokens, context=context)
        return self._transfers.store(keys_of, block_ids, start_token=start_token, stream=stream, timeout_s=timeout_s)

    def retrieve(
        self,
        lease_id: int,
        block_ids: Sequence[int],
        skip_tokens: int = 0,
        *,
        stream: int | None = None,
        timeout_s: float = _JOB_S,
        stages: int = 1,
    ) -> Job[RetrieveResult]:
        """Fill blocks with what a lookup promised; each rank takes its share once.

        `block_ids` are the blocks of the promised tokens, from the first on; more are left alone, as are those of the
        first `skip_tokens` (whole blocks). The server writes once the work that `stream` has now is done. Until the job
        is done, or `cancel` has returned, bytes may land in them; where it fails, `failed_block_ids` hold nothing. With
        `stages` (of 256, and of a block's planes, no more) layers come one after the other; see `Job.wait_stages`.
        """
        return self._transfers.retrieve(
            lease_id, block_ids, skip_tokens=skip_tokens, stream=stream, timeout_s=timeout_s, stages=stages
        )

    def stats(self) -> dict[str, float]:
        """The server's counters and gauges by name."""
        return self._call(messages.Stats, StatsReply).values

    def ping(self) -> None:
        """Return when the server has answered."""
        self._call(messages.Ping, Pong)

    def close(self) -> None:
        """Unregister, and hang up. Idempotent; never raises for a server that is gone."""
        if self._closed:
            return
        self._closed = True
        stopped = self._connection.close(self._timeout_s, self._presence.unregister)
        registration = self._presence.registration
        if stopped and registration is not None:  # else a server may still copy: what is shared stays
            registration.close()
            self._presence.registration = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self.connected else "cut off"
        return f"<CacheClient of engine {self._presence.engine_id!r}, {state}{self._lookups.late}>"

    def __del__(self) -> None:
        if not self._closed and not self._connection.closed:
            self._connection.drop()
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1, source=self)

    def _call(self, make: Callable[[int], Message], kind: type[_R]) -> _R:
        """A call that is of no use without a server."""
        return self._connection.needed_link().call(make, kind, self._timeout_s)
