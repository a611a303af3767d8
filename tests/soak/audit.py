"""What must hold whenever the load rests and when all is over, and what the engines' journals say."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from typing import Any

from serving.process import eventually
from soak.arena import Arena, without_numbers
from soak.board import read_journal

REST_S = 90.0
SETTLE_S = 10.0
AFTER_S = 1.0
# What a rank meets that comes back before the server has noticed that its old process is dead.
TOO_EARLY = {"rank_taken"}

_State = dict[str, Any]


class Audit:
    """Collects violations, each with what it is about."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._found: list[_State] = []
        self._dev_shm = _shared_files()
        self._alone = self._server_state()
        self._first: _State = {}

    def violation(self, what: str, **facts: Any) -> None:
        """Note something that must never be."""
        self._found.append({"kind": "violation", "at": time.monotonic(), "what": what, **facts})

    def rest_and_compare(self, when: str) -> None:
        """Have all engines rest; server and engines must then have exactly what they had the first time."""
        engines = self._arena.engines
        self._rest()
        wanted = (len(engines) + 1, len(engines), 0)
        _until(lambda: self._stats("sessions", "engines", "leases") == wanted)
        _until(lambda: len(self._unexplained_memory()) == 1)  # the server's own
        _until(lambda: not self._chunk_files_open())
        _until(self._has_settled)
        state: _State = {
            "the server's descriptors and threads": self._server_state(),
            "the engines' descriptors and threads": [engine.side.call("facts") for engine in engines],
            "sessions, engines, leases": self._stats("sessions", "engines", "leases"),
            "memory that the server maps, and no engine has": len(self._unexplained_memory()),
            "bytes in use beside the chunks": self._bytes_beside_chunks(),
        }
        self._first = self._first or state
        self._compare(self._first, state, when)
        for engine in engines:
            engine.side.call("resume")

    def check_the_end(self) -> None:
        """End engines and server in order: no slot, session, mapping, descriptor, thread, process, file may be left."""
        arena = self._arena
        self._rest()
        for engine in arena.engines:
            engine.side.call("clear")
        _until(lambda: self._stats("chunks", "memory_used_bytes") == (0, 0))
        self._compare(
            {"chunks": (0, 0)}, {"chunks": self._stats("chunks", "memory_used_bytes")}, "after all was cleared"
        )
        self._compare({"files": []}, {"files": arena.chunk_files()}, "in the lower tiers after all was cleared")
        missing = arena.engines[0].side.call("fill_memory", num_bytes=arena.memory_bytes, timeout_s=REST_S)["missing"]
        self._compare({"missing chunks": 0}, {"missing chunks": missing}, "once the whole memory has been stored to")
        for engine in arena.engines:
            engine.side.end(REST_S)
            arena.totals.update(engine.board.totals())
        _until(lambda: self._server_state() == self._alone)
        state = {"the server's descriptors and threads": self._server_state()}
        self._compare({"the server's descriptors and threads": self._alone}, state, "once all engines have ended")
        arena.pinger.close()
        arena.server.end(REST_S)
        _until(lambda: not arena.processes())
        left = {"processes": sorted(arena.processes()), "files": arena.files_left(), "in /dev/shm": _shared_files()}
        self._compare({"processes": [], "files": [], "in /dev/shm": self._dev_shm}, left, "when all had ended")

    def verdict(self) -> _State:
        """All violations; how often engines were told that the server was gone, and how late."""
        errors: Counter[str] = Counter()
        told_s = [0.0]
        violations = list(self._found)
        for path in sorted(self._arena.folder.glob("*.journal")):
            for entry in read_journal(path):
                if entry["kind"] == "error" and self._is_excused(entry):
                    errors[f"{entry['what']}: {entry['code']}"] += 1
                    told_s.append(self._told_s(entry))
                else:
                    violations.append(entry)
        return {"violations": violations, "excused_errors": dict(errors), "told_s": max(told_s)}

    def _is_excused(self, entry: _State) -> bool:
        """Whether the server was gone between the question and the answer, or shortly before."""
        if entry["what"] == "register" and entry["code"] in TOO_EARLY:
            return True
        asked_at = entry.get("asked_at") or entry["at"]
        return any(begin <= entry["at"] and asked_at <= end + AFTER_S for begin, end in self._arena.outages)

    def _told_s(self, entry: _State) -> float:
        """How long after the server's death a job failed that was going on then."""
        asked_at = entry.get("asked_at") or entry["at"]
        died = [begin for begin, _ in self._arena.outages if asked_at < begin <= entry["at"]]
        return float(entry["at"] - died[0]) if died else 0.0

    def _rest(self) -> None:
        engines = self._arena.engines
        for engine in engines:
            engine.side.ask("pause")
        for engine in engines:
            if not engine.side.answer(REST_S)["rested"]:
                self.violation("an engine does not come to rest", engine=engine.name, points=engine.board.points())

    def _server_state(self) -> _State:
        server = self._arena.server
        server.call("warm_up")
        return {"fds": server.fds(), "threads": without_numbers(server.call("threads")["threads"])}

    def _has_settled(self) -> bool:
        """Whether the server has what it had the first time or, the first time, what it had a second before."""
        before = self._first.get("the server's descriptors and threads")
        if before is None:
            before = self._server_state()
            time.sleep(1)
        return self._server_state() == before

    def _chunk_files_open(self) -> list[str]:
        """Files of lower tiers that are read or written, which goes on for a while when the load rests."""
        names = [name for name in self._arena.server.fds() if not name.endswith("/lock")]
        return [name for name in names if "/disk/" in name or "/remote/" in name]

    def _unexplained_memory(self) -> set[int]:
        mine = {inode for engine in self._arena.engines for inode in engine.side.memfd_inodes()}
        return self._arena.mapped_by_server() - mine

    def _stats(self, *names: str) -> tuple[float, ...]:
        stats = self._arena.pinger.stats()
        return tuple(stats.get(name, -1.0) for name in names)

    def _bytes_beside_chunks(self) -> float:
        used, chunks = self._stats("memory_used_bytes", "chunks")
        return used - chunks * self._arena.chunk_bytes

    def _compare(self, wanted: _State, found: _State, when: str) -> None:
        for name, value in wanted.items():
            if found[name] != value:
                self.violation(f"{name} {when}: not as it must be", expected=value, found=found[name])


def _until(condition: Any) -> None:
    """Give things the time to settle; whether they have is told by a comparison after it."""
    with contextlib.suppress(TimeoutError):
        eventually(condition, SETTLE_S)


def _shared_files() -> list[str]:
    return sorted(name for name in os.listdir("/dev/shm") if "kvferry" in name.lower())
