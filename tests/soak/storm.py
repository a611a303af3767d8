"""Two engines of eight threads each, chunks of 1 MiB, and a server that collects garbage all the time."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from soak.arena import Arena
from soak.audit import Audit

PING_S = 1.0
LOAD: dict[str, Any] = {"threads": 8, "prompts": 2, "chunk_bytes": 1 << 20, "habits": {"max_chunks": 4}}
SERVER: dict[str, Any] = {"memory_bytes": 48 << 20}


def run(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """`seconds` of load; nothing is left running. `ok` where pings were answered and all threads served."""
    arena = Arena(folder, (0, 0), seed=seed, server=SERVER, load=LOAD)
    try:
        audit = Audit(arena)
        for engine in arena.engines:
            arena.start_engine(engine)
        arena.server.call("stress_gc", threshold=1)
        pings_before = len(arena.pinger.times_s)
        time.sleep(seconds)
        pings = arena.pinger.times_s[pings_before:]
        turns = [row.get("turns") for engine in arena.engines for row in engine.board.rows[:-1]]
        audit.rest_and_compare("after the storm")
        audit.check_the_end()
        counts, verdict = arena.count(), audit.verdict()
    finally:
        arena.close()
    p99_s = statistics.quantiles(pings, n=100, method="inclusive")[98]
    moved = bool(counts["bytes_verified"] and counts["chunks_stored"] and min(turns) > 0)
    return {
        "seconds": seconds,
        "engines": counts,
        "turns_of_threads": turns,
        "pings": len(pings),
        "ping_s": {"p50": statistics.median(pings), "p99": p99_s, "max": max(pings), "limit": PING_S},
        "violations": verdict["violations"],
        "ok": not verdict["violations"] and moved and p99_s < PING_S,
    }
