"""What the scheduler side tells the workers each step. Plain data, which vLLM sends."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.connectors.vllm.p2p.handover import Handover


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Send the blocks of a prompt that this step completes."""

    job_id: int
    handover: Handover
    block_ids: tuple[int, ...]
    tag: bytes = b""


@dataclass(frozen=True, slots=True)
class ReceivePlan:
    """Fill the blocks `block_ids`; the first `skip_blocks` blocks of the transfer are there.

    Without a `handover` it fails: vLLM loads other tokens than were offered. `tag` is a hash of the prompt.
    """

    job_id: int
    request_id: str
    handover: Handover | None
    block_ids: tuple[int, ...]
    skip_blocks: int
    tag: bytes = b""


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """One step's work; `idle` where the step computes nothing, so that a worker may wait a moment for its jobs.

    `cancelled` are jobs whose request has ended. `dropped` will not be sent, or are not wanted.
    """

    sends: tuple[SendPlan, ...] = ()
    receives: tuple[ReceivePlan, ...] = ()
    cancelled: tuple[int, ...] = ()
    dropped: tuple[Handover, ...] = ()
    idle: bool = False
