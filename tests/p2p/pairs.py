"""Two p2p engines in this process: P, whose blocks are sent, and D, where they land."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kvferry.errors import TransferError
from kvferry.p2p import P2pNcclEngine, Receiving, Sending

FROM, TO = [5, 1, 30, 31], [9, 8, 2, 60]

Caches = dict[str, torch.Tensor]


class Pair(NamedTuple):
    """P and its caches, D and its caches."""

    p: P2pNcclEngine
    source: Caches
    d: P2pNcclEngine
    target: Caches


def equal(source: Caches, target: Caches) -> bool:
    """Whether the blocks FROM are at TO."""
    return all(torch.equal(target[name][:, TO], source[name][:, FROM]) for name in source)


def carriers(engine: P2pNcclEngine) -> list[str]:
    """Of its sessions."""
    return list(engine.stats()["peers"].values())


def send(p: P2pNcclEngine, d: P2pNcclEngine, name: str = "abc") -> None:
    """From P to D, until both are done: D may hear of it before it knows of its own claim, and is done after P then."""
    receiving = d.receive_blocks(name, TO, timeout_s=20)
    p.send_blocks(name, FROM, d.address).wait(20)
    receiving.wait(20)


def send_one_layer(p: P2pNcclEngine, d: P2pNcclEngine) -> tuple[Receiving, Sending]:
    """A transfer "abc" of which the first layer has landed, and no other is ready."""
    receiving = d.receive_blocks("abc", TO, timeout_s=20)
    sending = p.send_blocks("abc", FROM, d.address, layer_wise=True)
    sending.layer_ready(0)
    receiving.wait_layer(0, 20)
    return receiving, sending


def error_code(transfer: Receiving | Sending) -> str:
    """Wait for its end, which has to be an error."""
    with pytest.raises(TransferError) as caught:
        transfer.wait(20)
    return caught.value.code
