"""A server and engines under load, in processes of their own, that are killed and started again."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.client import CacheClient
from kvferry.errors import KVFerryError
from serving.process import Side, Zygote, eventually
from soak.board import COUNTS, Board

PING_EVERY_S = 0.02
CHUNK_NAME = 64  # digits


@dataclass
class Engine:
    """One engine as its watcher sees it; a new process each time it is started, of the same engine_id."""

    number: int
    layout: int
    generation: int = 0
    side: Side = field(init=False)
    board: Board = field(init=False)

    @property
    def name(self) -> str:
        return f"e{self.number}.{self.generation}"


class Arena:
    """`folder` holds the socket, boards and journals, and the lower tiers' folders where there are any."""

    def __init__(
        self, folder: Path, layouts: tuple[int, ...], *, seed: int, server: dict[str, Any], load: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/kv.sock"
        self._seed, self._load = seed, load
        self._config = {"socket_path": f"{folder}/kv.sock", "device": "cpu", **server}
        self.totals: Counter[str] = Counter()
        self.outages: list[list[float]] = []  # of the server: from when to when
        self.zygote = Zygote()
        self.server = self.begin_server()
        self.server.answer()
        self.pinger = Pinger(self.url)
        self.idler = Idler()
        self.engines = [Engine(number, layout) for number, layout in enumerate(layouts)]

    @property
    def memory_bytes(self) -> int:
        return int(self._config["memory_bytes"])

    @property
    def chunk_bytes(self) -> int:
        return int(self._load.get("chunk_bytes", 1 << 16))

    def begin_server(self, **changes: Any) -> Side:
        """Start a server without waiting for it; `changes` to its settings are for this one."""
        self.server = self.zygote.begin("server", **{**self._config, **changes})
        return self.server

    def begin_outage(self) -> None:
        """From now on engines may be told that the server is gone."""
        self.outages.append([time.monotonic(), float("inf")])

    def kill_server(self) -> None:
        self.begin_outage()
        self.server.kill()
        eventually(lambda: not self.server.alive)

    def end_outages(self) -> None:
        """The server serves again: from now on errors count."""
        for outage in self.outages:
            outage[1] = min(outage[1], time.monotonic())

    def start_engine(self, engine: Engine) -> None:
        """Fork a new process; it connects, registers and starts its load by itself."""
        engine.generation += 1
        path = self.folder / f"{engine.name}.board"
        threads = self._load.get("threads", 2)
        engine.board = Board(path, threads + 1, create=True)
        engine.side = self.zygote.start(
            "load",
            url=self.url,
            name=engine.name,
            folder=str(self.folder),
            engine_id=f"e{engine.number}",
            layout=engine.layout,
            seed=self._seed,
            **self._load,
        )
        engine.side.call("run")

    def kill_engine(self, engine: Engine) -> tuple[list[str], list[int]]:
        """SIGKILL; at which points its threads were, and the memfds that it had mapped."""
        inodes = engine.side.memfd_inodes()
        engine.side.kill()
        eventually(lambda: not engine.side.alive)
        self.totals.update(engine.board.totals())
        return engine.board.points(), inodes

    def mapped_by_server(self) -> set[int]:
        """The memfds that the server has mapped, its own too; none where it is dead."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return set(self.server.memfd_inodes())
        return set()

    def count(self) -> dict[str, int]:
        """All counters of all engines, the dead ones too."""
        found = Counter(self.totals)
        for engine in self.engines:
            found.update(engine.board.totals())
        return {name: found[name] for name in COUNTS}

    def processes(self) -> set[int]:
        """All that were forked and have not ended."""
        return self.zygote.children()

    def chunk_files(self) -> list[str]:
        """The files of all chunks in the lower tiers."""
        files = [path for tier in ("disk", "remote") for path in (self.folder / tier).rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(self.folder)) for path in files if len(path.name) == CHUNK_NAME)

    def files_left(self) -> list[str]:
        """What no run may leave: the socket, half-written chunks on disk, and in the object store where they stay.

        What a killed server was writing to that is in a place of its own, for a later one to remove.
        """
        found = [path for path in self.folder.rglob("*") if path.is_socket() or path.suffix == ".part"]
        found += [path for path in (self.folder / "remote").glob("kvferry-1/*/*") if _is_torn(path)]
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def close(self) -> None:
        """Kill what is left."""
        self.pinger.close()
        self.idler.close()
        for side in (self.server, *(engine.side for engine in self.engines if engine.generation)):
            side.kill()
        self.zygote.close()


class Pinger:
    """Asks the server all the time, in a thread of its own, and how long that takes."""

    def __init__(self, url: str) -> None:
        self.client = CacheClient(url, required=False)
        self.times_s: list[float] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pinger", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, float]:
        """The server's; empty while it is gone."""
        with contextlib.suppress(KVFerryError):
            return self.client.stats()
        return {}

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(20)
        self.client.close()

    def _run(self) -> None:
        while not self._stopping.wait(PING_EVERY_S):
            started = time.monotonic()
            with contextlib.suppress(KVFerryError):
                self.client.ping()
                self.times_s.append(time.monotonic() - started)


class Idler:
    """A process that wants a core every 10 ms, for a moment, and how late it comes: the machine's part of a ping."""

    CODE = """
import time
while True:
    wanted = time.monotonic() + 0.01
    time.sleep(0.01)
    print(time.monotonic() - wanted, flush=True)
"""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-S", "-c", self.CODE], stdout=subprocess.PIPE, text=True)
        self.late_s: list[float] = []
        self._thread = threading.Thread(target=self._run, name="idler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(20)
        self._thread.join(20)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # half a line, as it was killed
                self.late_s.append(float(line))


def _is_torn(path: Path) -> bool:
    return path.parent.name != "writing" and len(path.name) != CHUNK_NAME


def without_numbers(names: list[str]) -> list[str]:
    return sorted(re.sub(r"\d+", "#", name) for name in names)
