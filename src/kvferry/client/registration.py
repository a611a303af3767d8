"""One registered KV cache: what this process shares with the server, and the exchange that proves it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec

from kvferry.client.conversation import Conversation
from kvferry.client.link import Link
from kvferry.client.proofs import MappingProof, Nonces, Probes
from kvferry.client.storages import Storages
from kvferry.errors import KVFerryError, ShareError
from kvferry.ipc.captures import beside_captures
from kvferry.ipc.events import EventRing, encode_events, make_event_ring
from kvferry.ipc.wire import close_fds, encode_descriptors, fd_slots
from kvferry.protocol.message import Name
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

_PROBES_VERSION = 2  # of the protocol: servers that read where they are told
_PROBE_TIMES = 5


@dataclass(frozen=True, slots=True)
class RankName:
    """Which rank of which engine registers, and the size of its chunks in tokens."""

    engine_id: str
    model: str
    rank: int
    world_size: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        check_name("engine_id", self.engine_id)
        check_name("model", self.model)
        if not 0 <= self.rank < self.world_size < 1 << 31:
            raise ValueError(f"rank {self.rank} of world size {self.world_size}; ranks start at 0")


def check_name(what: str, name: str) -> None:
    """Raise ValueError for a name that no server takes."""
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError as error:
        raise ValueError(f"{what} is {name!r:.100}: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """A rank's cache that can be given to one server after the other. `close` once none has it any more."""

    name: RankName
    storages: Storages
    ring: EventRing

    @classmethod
    def make(cls, name: RankName, storages: Storages, *, isolated_ipc: bool, remote: bool) -> Registration:
        """Takes the storages, and closes them on error. `remote`: no descriptor can be passed to the server."""
        with contextlib.ExitStack() as undo:
            undo.callback(storages.close)
            ring = make_event_ring(storages.device_ordinal, isolated_ipc or remote, in_device_memory=remote)
            registration = cls(name, storages, ring)
            undo.pop_all()
        return registration

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


def register(link: Link, registration: Registration, timeout_s: float) -> None:
    """Give a cache to the server, with proof on both sides that it maps the very memory; live when this returns.

    The first bytes of every storage are other ones meanwhile, so nobody may use the cache yet.

    Raises RequestError where the server refuses, ShareError where it reads other memory; it has dropped the cache then.
    """
    _hand_over(link, registration, Nonces(registration.storages), timeout_s)


def register_again(link: Link, registration: Registration, timeout_s: float) -> None:
    """The same for a cache that may be in use: nothing is written to it. Raises what `register` raises."""
    at_start = link.greeting.version < _PROBES_VERSION
    for left in reversed(range(_PROBE_TIMES)):
        proofs = contextlib.nullcontext(Probes(registration.storages, at_start=at_start))
        try:
            with beside_captures(registration.storages.device_ordinal):
                _hand_over(link, registration, proofs, timeout_s)
            return
        except ShareError:
            if not left:
                raise


def unregister(link: Link, timeout_s: float) -> None:
    """Take the cache back; when this returns the server has no mapping of it. Without a cache nothing happens."""
    link.call(Unregister, Unregistered, timeout_s)


def _hand_over(
    link: Link, registration: Registration, proofs: AbstractContextManager[MappingProof], timeout_s: float
) -> None:
    with link.conversation() as talk:
        try:
            with proofs as proof:
                proof.check(_send(link, talk, registration, proof.offsets, timeout_s=timeout_s).nonces)
            link.send(Confirm(talk.seq), timeout_s)
            talk.receive(Registered, timeout_s)
        except BaseException:
            with contextlib.suppress(KVFerryError):  # the first error says more
                unregister(link, timeout_s)
            raise


def _send(
    link: Link, talk: Conversation, registration: Registration, probes: tuple[int, ...], *, timeout_s: float
) -> Proof:
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
            probes=probes,
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
