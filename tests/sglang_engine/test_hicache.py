"""KV outlives the engine that computed it, through HiCache: equal tokens, out of the cache server."""

from __future__ import annotations

import random

from sglang_engine.models import VOCAB
from sglang_engine.stage import Stage


def prompt(seed: int, num_tokens: int) -> list[int]:
    """The tokens of prompt number `seed`; prompts of one seed are prefixes of each other."""
    rng = random.Random(seed)
    return [rng.randrange(5, VOCAB) for _ in range(num_tokens)]


def test_restart(stage: Stage) -> None:
    stage.serve()
    first = stage.engine(**stage.hicache())
    cold = first.generate([prompt(1, 200)])
    print(cold)
    print(stage.server.stats())
