"""The engine: what callers use."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kvferry.errors import LayoutError, TransferError
from kvferry.layout import LayoutHints
from kvferry.p2p.assembly import Parts, assemble
from kvferry.p2p.caches import KVCaches
from kvferry.p2p.carriers.choice import Offered, offered
from kvferry.p2p.claims import claim_blocks, claim_tensor
from kvferry.p2p.config import P2pConfig
from kvferry.p2p.futures import Receiving, Sending, layer_number
from kvferry.p2p.memory import BlockMemory, Int64s, flat_memory, meta_of
from kvferry.p2p.posts import Posts
from kvferry.p2p.signal.messages import MAX_ID_CHARS, MAX_TAG_BYTES, Offer
from kvferry.p2p.signal.sockets import resolved
from kvferry.p2p.streams import mark

if TYPE_CHECKING:
    from typing_extensions import Self


Addresses = str | Sequence[str] | None


class P2pNcclEngine:
    """Sends KV to other engines and receives from them. Thread-safe; all waiting is done in the calling threads.

    See docs/p2p.md. The name is that of the engine in vLLM that it replaces: NCCL is one of its carriers.
    """

    def __init__(self, config: P2pConfig | None = None) -> None:
        """Raises ShareError where nothing can listen at the address, TransferError where its name is not known."""
        given: object = config
        if not isinstance(given, P2pConfig | None):
            raise TypeError(f"config is of type {type(given).__name__}; give P2pConfig(address='HOST:PORT', ...)")
        self.config = config or P2pConfig()
        self._parts: Parts = assemble(self.config)
        self._posts = Posts(self._parts, lease_s=self.config.lease_s)
        self._closed = False
        self._parts.start()

    @property
    def address(self) -> str:
        """Where peers reach this engine, with the real port."""
        return self._parts.sockets.address

    @property
    def instance_id(self) -> str:
        """What tells this engine from one that had its address before, in hexadecimal."""
        return self._parts.sessions.own.instance.hex()

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        format: str,
        layout_hints: Mapping[str, Any] | LayoutHints | None = None,
    ) -> None:
        """The caches that `send_blocks` and `receive_blocks` are about: a tensor a layer, named as in the peers.

        Sessions that there are end, since peers are told of the caches when a session begins.

        Raises LayoutError where the tensors do not fit the format or the hints.
        """
        caches = KVCaches.describe(kv_caches, format, layout_hints)
        found = offered(self.config.carrier, self._parts.all_carriers, self.config.device, caches)
        self._parts.loop.ask(partial(self._register, caches, found))

    def send_tensor(
        self, tensor_id: str, tensor: torch.Tensor, remote_address: str | None = None, *, timeout_s: float | None = None
    ) -> Sending:
        """Send one tensor, of the host or this engine's GPU, which must stay as it is until the `Sending` is done.

        With send type GET, or without an address, it is kept until a peer asks. With PUT the call waits, at most
        `timeout_s`, and raises what `Sending.wait` raises.
        """
        get = self.config.send_type == "GET"
        address = None if get or remote_address is None else resolved(remote_address)
        _check_id(tensor_id)
        memory = flat_memory(tensor, self._gpu)
        offer = _offer(tensor_id, item_bytes=(memory.items[0][1],), tensor=meta_of(tensor))
        sending = Sending(tensor_id)
        numbers = self._posts.send(sending, offer, memory, targets=[0 if address is None else address])
        self._posts.ready(numbers, [0], event=mark(tensor.device))
        if self.config.send_type == "PUT":
            sending.wait(timeout_s)
        return sending

    def recv_tensor(
        self,
        tensor_id: str,
        remote_address: str | None = None,
        *,
        timeout_s: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The tensor that a peer sends under this id, into `out` where that is given.

        Without `out` it is a view of the receive buffer, on this engine's GPU where it has one; its room is free again
        when the last view of it is gone, and the stream that was current when it was taken is done with it.
        With send type GET the peer at `remote_address` is asked. Raises TransferError, PeerGoneError.
        """
        return self.recv_tensor_async(tensor_id, remote_address, timeout_s=timeout_s, out=out).tensor()

    def recv_tensor_async(
        self,
        tensor_id: str,
        remote_address: str | None = None,
        *,
        timeout_s: float | None = None,
        out: torch.Tensor | None = None,
    ) -> Receiving:
        """The same without waiting: `Receiving.tensor` gives it. It ends within `timeout_s` (the lease's time)."""
        _check_id(tensor_id)
        get = self.config.send_type == "GET" and remote_address is not None
        address = resolved(remote_address) if get and remote_address is not None else None
        core, receiving = self._parts.core, Receiving(tensor_id)
        memory, event = (None, None) if out is None else (flat_memory(out, self._gpu), mark(out.device))
        claim = claim_tensor(receiving, out, memory=memory, ends_at=self._posts.until(timeout_s), posts=self._posts)
        receiving.on_cancel(
            partial(self._posts.quietly, partial(core.when_done, event, partial(core.cancel_claim, claim.key)))
        )
        self._posts.post(partial(core.when_done, event, partial(core.claim, claim, address)))
        return receiving

    def send_blocks(
        self,
        transfer_id: str,
        block_ids: Sequence[int] | Int64s,
        remote_address: Addresses = None,
        *,
        readers: int = 1,
        layer_wise: bool = False,
        tag: bytes = b"",
    ) -> Sending:
        """Send blocks of the registered caches; they must stay as they are until the `Sending` is done.

        `remote_address` may be several, one a rank that takes its heads; without one the blocks are kept until they
        are asked for by `readers` ranks. With `layer_wise` each layer waits for `Sending.layer_ready`. `tag`, of at
        most 64 bytes, says what their KV is of, such as a hash of the tokens; the receiver has to give the same.

        Raises BlockIdError, LayoutError, ValueError.
        """
        _check_id(transfer_id, tag)
        caches = self._caches()
        ids = caches.check_ids(block_ids)
        targets: list[str | int] = [resolved(address) for address in _listed(remote_address)] or list(range(readers))
        sending = Sending(transfer_id, len(targets))
        offer = _offer(transfer_id, item_bytes=(0,) * len(caches.layers), num_blocks=len(ids), tag=tag)
        numbers = self._posts.send(sending, offer, BlockMemory(caches, ids), targets=targets)
        layers = len(caches.layers)
        sending.on_layer_ready(
            lambda layer: self._posts.ready(numbers, [layer_number(layer, layers)], event=mark(caches.device))
        )
        if not layer_wise:
            self._posts.ready(numbers, range(layers), event=mark(caches.device))
        return sending

    def receive_blocks(
        self,
        transfer_id: str,
        block_ids: Sequence[int] | Int64s,
        remote_address: Addresses = None,
        *,
        skip_blocks: int = 0,
        senders: int | Sequence[str] = 1,
        tag: bytes = b"",
        timeout_s: float | None = None,
    ) -> Receiving:
        """Let a transfer land in blocks of the registered caches, which nobody else may touch until it is done.

        Its first `skip_blocks` blocks are not wanted, and not moved; `block_ids` are for the others. With an address
        (one a rank that has some of the heads) these are asked for it; without, it is waited for from `senders` ranks,
        and where these are addresses their death ends it.
        It ends within `timeout_s` (the lease's time). Where the sender has given another `tag` both sides have an error
        ("mismatch"). Raises BlockIdError, LayoutError, ValueError.
        """
        _check_id(transfer_id, tag)
        caches = self._caches()
        if skip_blocks < 0:
            raise ValueError(f"skip_blocks is {skip_blocks}; it is a number of blocks")
        memory = BlockMemory(caches, caches.check_ids(block_ids))
        asked = [resolved(address) for address in _listed(remote_address)]
        parts: list[str | None] = [*asked] or _senders(senders)
        receiving = Receiving(transfer_id, len(parts), len(caches.layers))
        core, until, event = self._parts.core, self._posts.until(timeout_s), mark(caches.device)
        claims = [
            claim_blocks(receiving, part, memory=memory, skip_blocks=skip_blocks, tag=tag, ends_at=until)
            for part in range(len(parts))
        ]
        cancels = [partial(core.when_done, event, partial(core.cancel_claim, claim.key)) for claim in claims]
        receiving.on_cancel(partial(self._posts.quietly, *cancels))
        for claim, address in zip(claims, parts, strict=True):
            call = partial(core.claim, claim, address, ask=bool(asked))
            self._posts.post(partial(core.when_done, event, call))
        return receiving

    def reject(self, transfer_id: str, remote_address: Addresses = None, *, senders: int = 1) -> None:
        """What comes under this id will not be taken: a claim of it ends, and a sender need not keep it any longer.

        Who keeps it is told at the addresses (one a rank); without any it is what `senders` ranks send by themselves.
        """
        addresses = [resolved(address) for address in _listed(remote_address)]
        self._posts.post(partial(self._parts.core.reject, transfer_id, len(addresses) or senders, addresses))

    def withdraw(self, transfer_id: str, remote_address: Addresses = None) -> None:
        """Nothing will come under this id: what is being sent under it ends, and whoever waits for it is told so.

        These are who asks for it and, with an address (one a rank), who waits for it there: now, or within a lease's
        time. What had landed whole stays.
        """
        _check_id(transfer_id)
        addresses = [resolved(address) for address in _listed(remote_address)]
        self._posts.post(partial(self._parts.core.withdraw, transfer_id, addresses))

    def stats(self) -> dict[str, Any]:
        """Peers, transfers, room and counters at this moment."""
        return self._parts.loop.ask(self._parts.snapshot)

    def close(self) -> None:
        """End all transfers with TransferError ("closed") and tell the peers. Idempotent."""
        self._closed = True
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1, source=self)
            self.close()

    def __repr__(self) -> str:
        return f"<P2pNcclEngine at {self.address}, {'closed' if self._closed else 'open'}>"

    @property
    def _gpu(self) -> int | None:
        """The GPU whose tensors may be sent and received."""
        caches = self._parts.core.caches
        return self.config.device if caches is None or caches.device.type != "cuda" else caches.device.index

    def _register(self, caches: KVCaches, found: Offered) -> None:
        parts = self._parts
        parts.core.caches, parts.core.not_offered = caches, found.why
        own = parts.sessions.own.offering(found.carriers, found.device_uuid)
        about = msgspec.structs.replace(own.about, geometry=caches.geometry, ipc_path=parts.ipc.path)
        parts.sessions.own = replace(own, about=about)
        for session in parts.sessions.all():
            parts.sessions.end(session, TransferError("renewed", "KV caches were registered"), tell=True)

    def _caches(self) -> KVCaches:
        caches = self._parts.core.caches
        if caches is None:
            raise LayoutError("no KV caches are registered: call register_kv_caches first")
        return caches


def _offer(transfer_id: str, **what: Any) -> Offer:
    """Without what depends on whom it goes to."""
    return Offer(number=1, transfer_id=transfer_id, part=0, lease_s=0.0, **what)


def _listed(address: Addresses) -> list[str]:
    return [] if address is None else [address] if isinstance(address, str) else list(address)


def _senders(senders: int | Sequence[str]) -> list[str | None]:
    """The addresses of those that send by themselves; None for each that has none."""
    return [None] * senders if isinstance(senders, int) else [resolved(address) for address in senders]


def _check_id(transfer_id: str, tag: bytes = b"") -> None:
    if len(tag) > MAX_TAG_BYTES:
        raise ValueError(f"a tag of {len(tag)} bytes; it has at most {MAX_TAG_BYTES}")
    if not isinstance(transfer_id, str) or not 0 < len(transfer_id) <= MAX_ID_CHARS:
        raise ValueError(f"a transfer id is a string of 1 to {MAX_ID_CHARS} characters, got {transfer_id!r:.100}")
