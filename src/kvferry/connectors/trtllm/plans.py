"""What the scheduler's side tells the workers each step. Plain data, which TensorRT-LLM sends to all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.layout import KeyContext


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Fill the blocks of a lease. `block_ids` are those of all promised tokens; the first `skip_tokens` are there."""

    request_id: int
    lease_id: int
    block_ids: tuple[int, ...]
    skip_tokens: int


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Keep the chunks of `tokens` (int32, little-endian) from `start_token` on; `block_ids` are those of all tokens."""

    request_id: int
    tokens: bytes
    context: KeyContext
    block_ids: tuple[int, ...]
    start_token: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work. `going_on` are the requests that were there before and still have their blocks.

    `broken`, where it is not empty, says why the step must not be computed: all ranks then end alike.
    """

    loads: tuple[LoadPlan, ...] = ()
    stores: tuple[StorePlan, ...] = ()
    going_on: frozenset[int] = frozenset()
    broken: str = ""
