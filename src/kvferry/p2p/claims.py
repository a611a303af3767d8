"""What callers wait for, as claims: which offers they fit, and how they are told."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from kvferry.errors import KVFerryError, TransferError
from kvferry.p2p.futures import Receiving
from kvferry.p2p.memory import BlockMemory, FlatMemory, meta_of, tensor_of
from kvferry.p2p.receive.store import Place, lend
from kvferry.p2p.signal.messages import Offer, TensorMeta
from kvferry.p2p.streams import Use
from kvferry.p2p.transfers.incoming_records import Claim, InKey


class GiveBack(Protocol):
    """Whom to tell that nobody has a tensor any more; in any thread."""

    def give_back(self, place: Place, use: Use) -> None: ...


def claim_tensor(
    receiving: Receiving, out: torch.Tensor | None, *, memory: FlatMemory | None, ends_at: float, posts: GiveBack
) -> Claim:
    """A claim to a tensor, into `out`, whose `memory` is given, too, or into room that is lent."""
    found: list[TensorMeta] = []
    wanted = None if out is None else meta_of(out)

    def problem(offer: Offer) -> TransferError | None:
        if offer.tensor is None:
            return TransferError("mismatch", f"{offer.transfer_id!r} is a transfer of blocks; a tensor is waited for")
        if wanted is not None and wanted != offer.tensor:
            return TransferError("mismatch", f"{offer.tensor} comes as {offer.transfer_id!r}; {wanted} is waited for")
        found.append(offer.tensor)
        return None

    def deliver(place: object, error: TransferError | None) -> None:
        if isinstance(place, Place):
            try:
                flat, use = lend(place, partial(posts.give_back, place))
                receiving.give(tensor_of(flat, found[-1]), use)
            except KVFerryError as problem:
                error = TransferError("failed", f"what has landed cannot be had as a tensor: {problem}")
        elif error is None and out is not None:
            receiving.give(out)
        receiving.part_ended(error)

    key = InKey(receiving.transfer_id, 0)
    return Claim(key, ends_at, problem, deliver, memory, progress=receiving.items_landed)


def claim_blocks(
    receiving: Receiving, part: int, *, memory: BlockMemory, skip_blocks: int, tag: bytes, ends_at: float
) -> Claim:
    """A claim to the blocks behind the first `skip_blocks`, of which part number `part` comes from one sender."""

    def problem(offer: Offer) -> TransferError | None:
        wanted = f"{skip_blocks + len(memory.ids)} blocks are waited for"
        if offer.tensor is not None:
            return TransferError("mismatch", f"{offer.transfer_id!r} is a tensor; {wanted}")
        if offer.num_blocks != skip_blocks + len(memory.ids):
            return TransferError("mismatch", f"{offer.num_blocks} blocks come as {offer.transfer_id!r}; {wanted}")
        if offer.tag != tag:
            return TransferError(
                "mismatch", f"what comes as {offer.transfer_id!r} is the KV of something else: other tags"
            )
        return None

    key = InKey(receiving.transfer_id, part)
    return Claim(
        key,
        ends_at,
        problem,
        lambda _, error: receiving.part_ended(error),
        memory,
        skip_blocks,
        receiving.items_landed,
    )
