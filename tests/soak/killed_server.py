"""A server that is killed in the middle of a big retrieve, on any device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from serving.engine_side import BLOCK_SIZE
from serving.process import Side, Stage, Zygote, eventually

WATCH_S = 2.0
HEADS = 128
BLOCK_BYTES = HEADS * 2048
# When to kill, in parts of what the same retrieve has just taken: a busy machine is not as even as that.
MOMENTS = (0.5, 0.3, 0.7, 0.2, 0.4, 0.1, 0.6, 0.05, 0.8)


def kill_in_retrieve(zygote: Zygote, folder: Path, *, device: str, num_bytes: int) -> list[dict[str, Any]]:
    """What the engine saw each time that its server was killed; the last time was in the middle, unless none was.

    The engine stays the same throughout, and every server that comes serves it.
    """
    num_blocks = num_bytes // BLOCK_BYTES
    kind = "cpu" if device == "cpu" else "cuda"
    stage = Stage(zygote, folder, device=kind, memory_bytes=num_bytes + (64 << 20))
    seen: list[dict[str, Any]] = []
    try:
        engine = stage.engine(kind="doomed", num_blocks=num_blocks, heads=HEADS, device=device)
        for moment in MOMENTS:
            took_s = _store_and_retrieve(stage, engine, num_blocks)
            _ask_to_retrieve(engine, num_blocks)
            time.sleep(took_s * moment)
            stage.server.kill()
            seen.append(engine.answer(80))
            if 0 < seen[-1].get("landed", 0) < num_blocks:
                break
            eventually(lambda: not stage.server.alive)
            stage.start_server()
            eventually(lambda: bool(engine.call("connected")["connected"]), 20)
    finally:
        stage.close()
    return seen


def _store_and_retrieve(stage: Stage, engine: Side, num_blocks: int) -> float:
    """Have all of the cache stored; the seconds that retrieving all of it takes."""
    stage.wait_for_memory(engine)
    engine.call("wipe", value=1.0)
    half = num_blocks // 8 * 4
    for count in (half, num_blocks):  # one store must not have all memory to itself
        engine.call("store", seed=1, num_tokens=count * BLOCK_SIZE, blocks=list(range(count)))
    _ask_to_retrieve(engine, num_blocks)
    done = engine.answer(80)
    assert done["error"] is None, done
    return float(done["took_s"])


def _ask_to_retrieve(engine: Side, num_blocks: int) -> None:
    found = engine.call("lookup", seed=1, num_tokens=num_blocks * BLOCK_SIZE)
    assert found["tokens"] == num_blocks * BLOCK_SIZE, found
    engine.call("wipe", value=-1.0)
    blocks = list(range(num_blocks))
    engine.ask("retrieve_and_overwrite", lease=found["lease"], blocks=blocks, value=0.5, watch_s=WATCH_S)
