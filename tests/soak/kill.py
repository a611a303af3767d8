"""Kill engines at random points, very often, and count what is left: `python tests/soak/kill.py COUNT`.

Prints one JSON object; exits with 1 where anything leaked, any byte was wrong, or another session was harmed. Engines
die idle, with small and big copies in flight, in the middle of registering, while a forked child holds their socket.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving.engine_side import CHUNK_TOKENS
from serving.process import Side, SideError, Stage, Zygote, eventually

LIMIT_S = 0.5
WATCHED = list(range(32))
NUM_BLOCKS = 1024  # 16 MiB
KINDS = ("idle", "store", "big_store", "hung", "retrieve", "registering", "forked", "lookup")


class Soak:
    """One server, one engine that watches, and victims."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.zygote = Zygote()
        self.stage = Stage(self.zygote, folder, memory_bytes=48 << 20)
        self.watcher = self.stage.engine(register={"engine_id": "watcher"})
        self.stage.wait_for_memory(self.watcher)
        self.digest = self.watcher.call("fill", blocks=WATCHED, seed=0)["digest"]
        self.dice = random.Random(seed)
        self.compared_blocks = 0
        self.wrong_bytes = 0
        self.harmed = 0
        self.back_s: list[float] = []
        self.kinds: Counter[str] = Counter()

    def round(self, number: int) -> None:
        """One victim's life, and what the watcher finds after it."""
        kind = self.dice.choice(KINDS)
        self.kinds[kind] += 1
        seed = 1 + number % 50
        blocks = list(range(NUM_BLOCKS))
        victim = self.stage.engine(register={}, num_blocks=NUM_BLOCKS)
        children: list[int] = []
        digest: list[str] = []
        inode = 0
        if kind == "registering":
            victim.ask("register", engine_id="victim")
        else:
            inode = victim.call("register", engine_id="victim")["inode"]
            digest = victim.call("fill", blocks=blocks[:32], seed=seed)["digest"]
        if kind in ("store", "hung", "forked", "retrieve"):
            if kind == "hung":
                victim.call("stick")
            victim.call("store", seed=seed, num_tokens=8 * CHUNK_TOKENS, blocks=blocks[:32], wait=kind == "retrieve")
        if kind == "big_store":
            victim.call("store", seed=1000 + number, num_tokens=256 * CHUNK_TOKENS, blocks=blocks, wait=False)
        if kind == "forked":
            children.append(victim.call("fork")["pid"])
        if kind in ("retrieve", "lookup"):
            found = victim.call("lookup", seed=seed, num_tokens=8 * CHUNK_TOKENS)
            if kind == "retrieve" and found["tokens"]:
                victim.ask("retrieve", lease=found["lease"], blocks=blocks[100:132])
        time.sleep(self.dice.random() ** 3 * 0.02)
        self._kill(victim, inode)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._check(seed, digest)

    def _kill(self, victim: Side, inode: int) -> None:
        killed_at = victim.kill()
        eventually(lambda: self._stats()["sessions"] == 1 and inode not in self.stage.server.memfd_inodes(), 10)
        self.back_s.append(time.monotonic() - killed_at)

    def _stats(self) -> dict[str, float]:
        stats: dict[str, float] = self.watcher.call("stats")["stats"]
        return stats

    def _check(self, seed: int, digest: list[str]) -> None:
        """Whatever is there of the victim's prompt is right, and the watcher's own chunks still come and go."""
        try:
            self._compare(seed, digest, "check")
            self.watcher.call("store", seed=0, num_tokens=8 * CHUNK_TOKENS, blocks=WATCHED)
            self.harmed += not self._compare(0, self.digest, "own")
        except (SideError, AssertionError):
            self.harmed += 1

    def _compare(self, seed: int, digest: list[str], request: str) -> bool:
        """Retrieve what is there of a prompt and compare it; whether any of it was there."""
        found = self.watcher.call("lookup", seed=seed, num_tokens=8 * CHUNK_TOKENS, request=request)
        count = found["tokens"] // 16
        if not count:
            return False
        target = WATCHED if request == "check" else list(range(32, 64))
        assert self.watcher.call("retrieve", lease=found["lease"], blocks=target[:count])["failed"] == []
        self.compared_blocks += count * bool(digest)
        if digest and self.watcher.call("digest", blocks=target[:count])["digest"] != digest[:count]:
            self.wrong_bytes += 1
        if request == "check":
            self.watcher.call("fill", blocks=WATCHED, seed=0)
        return True

    def state(self) -> dict[str, Any]:
        """What must be the same at the end as after the first few kills."""
        server = self.stage.server
        stats = self._stats()
        return {
            "fds": server.fds(),
            "mapped_segments": len(server.memfd_inodes()),
            "mappings": server.call("mappings")["mapped"],
            "dev_shm": sorted(os.listdir("/dev/shm")),
            "engines": stats["engines"],
            "leases": stats["leases"],
            "sessions": stats["sessions"],
        }

    def close(self) -> None:
        self.stage.close()
        self.zygote.close()


def run(count: int, seed: int) -> dict[str, Any]:
    """`count` kills; the result."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), seed)
        try:
            for number in range(10):
                soak.round(number)
            soak.back_s.clear()
            before, shmem_before = soak.state(), shmem_kib()
            for number in range(10, 10 + count):
                soak.round(number)
            after, shmem_after = soak.state(), shmem_kib()
        finally:
            soak.close()
    times = sorted(soak.back_s)
    leaked = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
    return {
        "kills": count,
        "seed": seed,
        "kinds": dict(soak.kinds),
        "leaked": leaked,
        "compared_blocks": soak.compared_blocks,
        "wrong_bytes": soak.wrong_bytes,
        "harmed": soak.harmed,
        "memory_back_s": {"p50": times[len(times) // 2], "max": times[-1], "limit": LIMIT_S},
        "late": sum(value >= LIMIT_S for value in times),
        "shmem_kib": [shmem_before, shmem_after],
        "seconds": time.monotonic() - started,
        "ok": not leaked and not soak.wrong_bytes and not soak.harmed and times[-1] < LIMIT_S,
    }


def shmem_kib() -> int:
    """The machine's shared memory, that of others too."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill engines at random points and count what is left.")
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = run(max(1, arguments.count), arguments.seed)
    print(json.dumps(result))
    raise SystemExit(not result["ok"])


if __name__ == "__main__":
    main()
