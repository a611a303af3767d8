"""One registered KV cache: what this process shares with the server, and the exchange that proves it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from kvferry.client.link import Conversation, Link
from kvferry.client.storages import Nonces, Storages
from kvferry.errors import KVFerryError
from kvferry.ipc.events import EventRing, encode_events, make_event_ring
from kvferry.ipc.wire import close_fds, encode_descriptors, fd_slots
from kvferry.protocol.messages import (
    MAX_FDS_A_BATCH,
    Confirm,
    FdAck,
    FdBatch,
    Proof,
    Register,
    Registered,
    Unregister,
    Unregistered,
)


@dataclass(frozen=True, slots=True)
class RankName:
    """Which rank of which engine registers, and the size of its chunks in tokens."""

    engine_id: str
    model: str
    rank: int
    world_size: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """A rank that the server knows. `close` once the server has let go of it."""

    name: RankName
    storages: Storages
    ring: EventRing

    @property
    def blocks_a_chunk(self) -> int:
        """Blocks of one chunk."""
        return self.name.chunk_tokens // self.storages.layout.block_size

    def close(self) -> None:
        """Stop exporting memory and events. Idempotent."""
        try:
            self.ring.close()
        finally:
            self.storages.close()


def register(link: Link, name: RankName, storages: Storages, *, isolated_ipc: bool, timeout_s: float) -> Registration:
    """Give a cache to the server, with proof on both sides that it maps the very memory; live when this returns.

    The first bytes of every storage are other ones meanwhile, so nobody may use the cache yet. Takes the storages, and
    closes them on error.

    Raises RequestError where the server refuses, ShareError where it reads other memory; it has dropped the cache then.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(storages.close)
        device = storages.device.index if storages.device.type == "cuda" else None
        ring = make_event_ring(device, isolated_ipc)
        undo.callback(ring.close)
        registration = Registration(name, storages, ring)
        _hand_over(link, registration, timeout_s)
        undo.pop_all()
    return registration


def _hand_over(link: Link, registration: Registration, timeout_s: float) -> None:
    with link.conversation() as talk:
        try:
            with Nonces(registration.storages) as nonces:
                nonces.check(_send(link, talk, registration, timeout_s).nonces)
            link.send(Confirm(talk.seq), timeout_s)
            talk.receive(Registered, timeout_s)
        except BaseException:
            with contextlib.suppress(KVFerryError):  # the first error says more
                unregister(link, timeout_s)
            raise


def unregister(link: Link, timeout_s: float) -> None:
    """Take the cache back; when this returns the server has no mapping of it. Without a cache nothing happens."""
    link.call(Unregister, Unregistered, timeout_s)


def _send(link: Link, talk: Conversation, registration: Registration, timeout_s: float) -> Proof:
    """Send what describes the cache, then all descriptors; what the server reads through its mapping."""
    name, storages = registration.name, registration.storages
    slots = fd_slots(storages.wrappers)
    events, event_fds = encode_events(registration.ring)
    try:
        message = Register(
            seq=talk.seq,
            engine_id=name.engine_id,
            model=name.model,
            rank=name.rank,
            world_size=name.world_size,
            chunk_tokens=name.chunk_tokens,
            device_uuid=storages.device_uuid,
            layout=storages.layout,
            wrappers=encode_descriptors(storages.wrappers),
            num_fds=len(slots),
            events=events,
            num_event_fds=len(event_fds),
        )
        link.send(message, timeout_s)
        talk.receive(FdAck, timeout_s)
        for start in range(0, len(slots), MAX_FDS_A_BATCH):
            batch = slots[start : start + MAX_FDS_A_BATCH]
            fds: list[int] = []
            try:
                for wrapper, index in batch:
                    fds.append(wrapper.export_fd(index))
                _send_batch(link, talk, fds, timeout_s)
            finally:
                close_fds(fds)
        if event_fds:
            _send_batch(link, talk, event_fds, timeout_s)
    finally:
        close_fds(event_fds)
    return talk.receive(Proof, timeout_s)


def _send_batch(link: Link, talk: Conversation, fds: list[int], timeout_s: float) -> None:
    """Send one batch, and wait until the server has taken it in."""
    link.send(FdBatch(talk.seq, len(fds)), timeout_s, fds)
    talk.receive(FdAck, timeout_s)
