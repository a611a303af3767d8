"""Four engines under load; SIGKILL at random points for them and their server: `python tests/soak/chaos.py KILLS`.

Then a storm without kills. Prints one JSON object; exits with 1 where any byte was wrong, a promise was not kept, or
anything is left. The same --seed gives the same prompts, choices and pauses; where that hits, the machine decides.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving.process import eventually
from soak import storm
from soak.arena import Arena, Engine
from soak.audit import Audit

LAYOUTS = (0, 0, 1, 1)
SERVER: dict[str, Any] = {"memory_bytes": 24 << 20, "lease_ttl_s": 3600.0}  # a death ends leases, not a clock
DISK: dict[str, Any] = {"disk_bytes": 64 << 20}
AIM_S = 0.2
SERVE_AGAIN_S = 10.0  # what is promised; later than that is counted, and only PATIENCE_S is a violation
PATIENCE_S = 40.0
LEAK_S = 5.0
PING_S = 1.0  # later ones are counted, beside how late the machine gives a process a core that wants next to nothing
MEMORY_BACK_S = 0.5  # of the median; one that is late has had no core
REST_EVERY = 25
MAX_VIOLATIONS = 20
# What is killed, and how often of 100.
WAYS = {
    "engine": 50,
    "newborn": 12,
    "frozen engine": 5,
    "server": 14,
    "server and engine": 5,
    "starting server": 6,
    "stopping server": 4,
    "frozen server": 4,
}
FROZEN_S = 0.3
ENGINE_POINTS = ("lookup", "retrieve", "retrieve", "cancel", "fill", "store", "store", None)
SERVER_POINTS = ("lookup", "retrieve", "retrieve", "store", "store", "register", None)


class Chaos:
    """Kills until there were enough; every kill is one SIGKILL."""

    def __init__(self, folder: Path, seed: int, *, disk: bool, remote: bool) -> None:
        self.dice, self.lower = random.Random(seed), disk or remote
        server = {**SERVER, **({"disk_path": f"{folder}/disk", **DISK} if disk else {})}
        if remote:
            server["remote_url"] = f"file://{folder}/remote"
        self.arena = Arena(folder, LAYOUTS, seed=seed, server=server, load={})
        self.audit = Audit(self.arena)
        self.kills: Counter[str] = Counter()
        self.points: dict[str, Counter[str]] = {"engine": Counter(), "server": Counter()}
        self.back_s: list[float] = []
        self.again_s: list[float] = []
        self.hit_s: list[float] = []
        self.misses: Counter[str] = Counter()

    def run(self, num_kills: int) -> None:
        for engine in self.arena.engines:
            self.arena.start_engine(engine)
        self._await_service(time.monotonic())
        self.audit.rest_and_compare("before the first kill")
        rest_at = REST_EVERY
        while self.num_kills < num_kills:
            self._kill_something()
            if self.num_kills >= rest_at or self.num_kills >= num_kills:
                rest_at += REST_EVERY
                self._rest()
                if len(self.audit.verdict()["violations"]) > MAX_VIOLATIONS:
                    return
        self._count_misses()
        self.audit.check_the_end()
        if statistics.median(self.back_s) > MEMORY_BACK_S:
            self.audit.violation("dead engines' memory comes back late", seconds=sorted(self.back_s))

    @property
    def num_kills(self) -> int:
        return self.kills.total()

    def _rest(self) -> None:
        """Let a server that may have just come see some engines die, and compare what is left."""
        for engine in self.dice.sample(self.arena.engines, 2):
            self._await_service(time.monotonic())
            self._kill_engine(engine, self.dice.choice(ENGINE_POINTS))
        self._await_service(time.monotonic())
        self.audit.rest_and_compare(f"after {self.num_kills} kills")

    def _kill_something(self) -> None:
        (way,) = self.dice.choices(list(WAYS), weights=list(WAYS.values()))
        if way == "engine":
            self._kill_engine(self.dice.choice(self.arena.engines), self.dice.choice(ENGINE_POINTS))
        elif way == "newborn":
            engine = self.dice.choice(self.arena.engines)
            self._kill_engine(engine, None)
            self._kill_engine(engine, self.dice.choice(("connect", "register", "register", "lookup")))
        elif way == "frozen engine":
            engine = self.dice.choice(self.arena.engines)
            self._aim(self.dice.choice(ENGINE_POINTS), engine)
            self._freeze(engine.side.pid)
            self._kill_engine(engine, None)
        elif way == "frozen server":
            self._aim(self.dice.choice(SERVER_POINTS))
            self._count_misses()
            self.arena.begin_outage()
            self._freeze(self.arena.server.pid)
            self._kill_server("frozen")
            self._restart_server()
        elif way == "stopping server":
            self._count_misses()
            self.arena.begin_outage()
            self.arena.server.ask("stop")
            time.sleep(self.dice.random() ** 2 * 0.05)
            self._kill_server("stopping")
            self._restart_server()
        else:
            point = self._aim(self.dice.choice(SERVER_POINTS))
            self._count_misses()
            self._kill_server(point)
            if way == "server and engine":
                self._kill_engine(self.dice.choice(self.arena.engines), None)
            if way == "starting server":
                self.arena.begin_server(**self._policy())
                time.sleep(self.dice.random() * 0.06)
                self._kill_server("starting")
            self._restart_server()

    def _kill_engine(self, engine: Engine, point: str | None) -> None:
        self._aim(point, engine)
        points, inodes = self.arena.kill_engine(engine)
        killed_at = time.monotonic()
        self.kills["engine"] += 1
        self.points["engine"].update({name for name in points if name not in ("idle", "end")} or {"idle"})
        try:
            eventually(lambda: not self.arena.mapped_by_server() & set(inodes), LEAK_S)
        except TimeoutError:
            self.audit.violation("the server maps a dead engine's memory", engine=engine.name, points=points)
        self.back_s.append(time.monotonic() - killed_at)
        time.sleep(self.dice.random() ** 3 * 0.1)
        self.arena.start_engine(engine)

    def _freeze(self, pid: int) -> None:
        """For a while, and it is still frozen when it dies."""
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.dice.random() * FROZEN_S)

    def _kill_server(self, point: str) -> None:
        self.arena.kill_server()
        self.kills["server"] += 1
        self.points["server"][point] += 1

    def _restart_server(self) -> None:
        """A server again, and mostly wait until it serves all engines; sometimes the next kill comes before that."""
        time.sleep(self.dice.random() ** 3 * 0.5)
        started_at = time.monotonic()
        self.arena.begin_server(**self._policy()).answer()
        if self.dice.random() < 0.8:
            self.again_s.append(self._await_service(started_at))

    def _policy(self) -> dict[str, Any]:
        """A server that comes may work in another way than the one before, over the same disk."""
        policy = (
            {"write_policy": self.dice.choice(("write-through", "write-through", "write-back"))} if self.lower else {}
        )
        return {"verify_memory": self.dice.random() < 0.3, **policy}

    def _await_service(self, since: float) -> float:
        """Wait until every engine has stored or retrieved something after `since`, which ends the outage; how long."""
        boards = [engine.board for engine in self.arena.engines]
        try:
            eventually(lambda: all(board.latest("served_at") > since for board in boards), PATIENCE_S)
        except TimeoutError:
            late = [engine.name for engine in self.arena.engines if engine.board.latest("served_at") <= since]
            self.audit.violation(f"not served within {PATIENCE_S:g} s", engines=late)
        self.arena.end_outages()
        return max(board.latest("served_at") for board in boards) - since

    def _aim(self, point: str | None, engine: Engine | None = None) -> str:
        """Wait until a thread is at that point, then some random time; the point, or "any" where none came there."""
        boards = [one.board for one in ([engine] if engine else self.arena.engines)]
        until = time.monotonic() + AIM_S
        met = False
        while point is not None and not met and time.monotonic() < until:
            met = any(point in board.points() for board in boards)
        time.sleep(self.dice.random() ** 3 * (0.005 if met else 0.05))
        return str(point) if met else "any"

    def _count_misses(self) -> None:
        """A server's counters die with it."""
        stats = self.arena.pinger.stats()
        self.misses.update({name: int(value) for name, value in stats.items() if name.startswith("misses_")})

    def result(self) -> dict[str, Any]:
        counts = self.arena.count()
        verdict = self.audit.verdict()
        pings = sorted(self.arena.pinger.times_s)
        return {
            "kills": self.num_kills,
            "killed": dict(self.kills),
            "points": {who: dict(points) for who, points in self.points.items()},
            "engines": counts,
            "misses_by_reason": dict(self.misses),
            "served_again_s": _summary(self.again_s, SERVE_AGAIN_S),
            "served_late": sum(again > SERVE_AGAIN_S for again in self.again_s),
            "memory_back_s": _summary(self.back_s, MEMORY_BACK_S),
            "ping_s": _summary(pings, PING_S),
            "pings_late": sum(ping > PING_S for ping in pings),
            "idle_process_late_s": _summary(sorted(self.arena.idler.late_s), None),
            "told_of_death_s": verdict["told_s"],
            "excused_errors": verdict["excused_errors"],
            "violations": verdict["violations"],
        }


def _summary(values: list[float], limit: float | None) -> dict[str, float | None]:
    if len(values) < 2:
        return {"p50": None, "p99": None, "max": max(values, default=None), "limit": limit}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98], "max": max(values), "limit": limit}


def run(num_kills: int, seed: int, folder: Path, *, disk: bool = True, remote: bool = False) -> dict[str, Any]:
    """All of it; nothing is left running."""
    started = time.monotonic()
    chaos = Chaos(folder, seed, disk=disk, remote=remote)
    try:
        chaos.run(num_kills)
        result = chaos.result()
    finally:
        chaos.arena.close()
    counts = result["engines"]
    ok = not result["violations"] and counts["bytes_verified"] > 0 and counts["hits"] > 0
    return {**result, "seed": seed, "disk": disk, "remote": remote, "seconds": time.monotonic() - started, "ok": ok}


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill engines and their server at random points, under load.")
    parser.add_argument("kills", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-disk", action="store_true", help="keep KV in memory only, or there and in the object store"
    )
    parser.add_argument("--remote", action="store_true", help="with an object store, which is a folder (file://)")
    parser.add_argument("--storm-s", type=float, default=60.0, help="seconds of many threads and no kills, after it")
    arguments = parser.parse_args()
    logging.getLogger("kvferry.client").setLevel(logging.ERROR)  # that the server is gone is no news here
    with tempfile.TemporaryDirectory() as folder:
        tiers = {"disk": not arguments.no_disk, "remote": arguments.remote}
        result = run(arguments.kills, arguments.seed, Path(folder), **tiers)
    with tempfile.TemporaryDirectory() as folder:
        result["storm"] = storm.run(arguments.storm_s, arguments.seed, Path(folder))
    result["ok"] = result["ok"] and result["storm"]["ok"]
    print(json.dumps(result))
    raise SystemExit(not result["ok"])


if __name__ == "__main__":
    main()
