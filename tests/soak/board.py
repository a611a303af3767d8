"""What an engine under load has done, in files that outlive its SIGKILL: counters, and lines about what went wrong."""

from __future__ import annotations

import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

POINTS = ("idle", "connect", "register", "lookup", "retrieve", "cancel", "release", "fill", "store", "clear", "end")
COUNTS = (
    "turns",
    "lookups",
    "tokens_asked",
    "tokens_found",
    "hits",
    "misses",
    "misses_cut_off",
    "retrieves",
    "retrieves_failed",
    "cancels",
    "leases_left",
    "clears",
    "stores",
    "stores_failed",
    "chunks_stored",
    "chunks_present",
    "chunks_skipped",
    "bytes_verified",
    "blocks_left_alone",
)
_NOTES = ("point", "served_at", "hit_at")  # the last two in nanoseconds of the monotonic clock
_COLUMNS = (*COUNTS, *_NOTES)


class Row:
    """The figures of one thread; it alone writes them."""

    def __init__(self, cells: npt.NDArray[np.int64]) -> None:
        self._cells = cells
        self._places = {name: place for place, name in enumerate(_COLUMNS)}

    def add(self, name: str, count: int = 1) -> None:
        self._cells[self._places[name]] += count

    def at(self, point: str) -> None:
        """Where the thread is from now on."""
        self._cells[self._places["point"]] = POINTS.index(point)

    def note_now(self, name: str) -> None:
        """`served_at`: the server has just done something for it; `hit_at`: and that was a hit."""
        self._cells[self._places[name]] = time.monotonic_ns()

    def get(self, name: str) -> int:
        return int(self._cells[self._places[name]])

    @property
    def point(self) -> str:
        return POINTS[self.get("point")]


class Board:
    """The rows of one engine's threads, shared with who watches them."""

    def __init__(self, path: Path, num_rows: int, *, create: bool = False) -> None:
        nbytes = num_rows * len(_COLUMNS) * 8
        with path.open("x+b" if create else "r+b") as file:
            if create:
                file.truncate(nbytes)
            self._memory = mmap.mmap(file.fileno(), nbytes)
        cells = np.frombuffer(self._memory, dtype=np.int64).reshape(num_rows, len(_COLUMNS))
        self.rows = [Row(row) for row in cells]

    def totals(self) -> dict[str, int]:
        """The counters of all rows."""
        return {name: sum(row.get(name) for row in self.rows) for name in COUNTS}

    def points(self) -> list[str]:
        """Where each thread is."""
        return [row.point for row in self.rows]

    def latest(self, name: str) -> float:
        """The latest `served_at` or `hit_at` of any thread, in seconds; 0 where there is none."""
        return max(row.get(name) for row in self.rows) / 1e9


class Journal:
    """Lines about violations and errors; one write each, so that none is lost or torn by a SIGKILL."""

    def __init__(self, path: Path, who: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._who = who

    def violation(self, what: str, **facts: Any) -> None:
        """Something that must never be."""
        self._write("violation", what, facts)

    def error(self, what: str, **facts: Any) -> None:
        """Something that may be while the server is gone, and at no other time."""
        self._write("error", what, facts)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, kind: str, what: str, facts: dict[str, Any]) -> None:
        line = {"kind": kind, "at": time.monotonic(), "engine": self._who, "what": what, **facts}
        os.write(self._fd, json.dumps(line).encode() + b"\n")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All lines so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
