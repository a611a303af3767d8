"""Offers as they are for one peer, and what is wrong with those that peers make."""

from __future__ import annotations

import math

import msgspec

from kvferry.errors import TransferError
from kvferry.ipc.descriptor import DTYPES
from kvferry.p2p.caches import KVCaches
from kvferry.p2p.memory import BlockMemory, Memory
from kvferry.p2p.signal.handshake import IPC_CARRIER
from kvferry.p2p.signal.messages import MAX_BLOCK_IDS, Offer
from kvferry.p2p.signal.session import Session

_NOT_REGISTERED = "both engines must register their KV caches first"


def fitted(session: Session, offer: Offer, source: Memory) -> Offer | TransferError:
    """The offer as it goes over a session, or why there is none."""
    if not isinstance(source, BlockMemory):
        return offer
    if not session.moves_blocks:
        return TransferError("mismatch", f"{session!r}: {_NOT_REGISTERED}")
    sizes = tuple(nbytes * offer.num_blocks for nbytes in session.layer_bytes())
    found = msgspec.structs.replace(offer, item_bytes=sizes, part=session.part_of_mine())
    return _with_block_ids(found, source) if session.carrier == IPC_CARRIER else found


def unfit(session: Session, offer: Offer, caches: KVCaches | None) -> TransferError | None:
    """What is wrong with a peer's offer in itself; None where nothing is. `caches` are this engine's."""
    if offer.tensor is not None:
        dtype = DTYPES.get(offer.tensor.dtype)
        size = math.prod(offer.tensor.shape) * dtype.itemsize if dtype is not None else -1
        if offer.item_bytes != (size,):
            return TransferError("mismatch", f"{offer.tensor} in {offer.item_bytes} bytes")
    elif caches is None or not session.moves_blocks:
        return TransferError("mismatch", _NOT_REGISTERED)
    elif not 0 < offer.num_blocks <= caches.num_blocks:
        return TransferError("too_large", f"{offer.num_blocks} blocks; this cache has {caches.num_blocks}")
    elif offer.item_bytes != tuple(nbytes * offer.num_blocks for nbytes in session.layer_bytes()):
        return TransferError("mismatch", f"{offer.num_blocks} blocks in other numbers of bytes than agreed")
    return None


def _with_block_ids(offer: Offer, source: BlockMemory) -> Offer | TransferError:
    """For a receiver that reads the sender's blocks itself."""
    if len(source.ids) > MAX_BLOCK_IDS:
        return TransferError("too_large", f"{len(source.ids)} blocks in one transfer; {MAX_BLOCK_IDS} can be named")
    return msgspec.structs.replace(offer, block_ids=source.ids.astype("<i4").tobytes())
