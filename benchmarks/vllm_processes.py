"""The processes of benchmarks/vllm_*.py: engines and their cache server, none of them waited for without end."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO, Any

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = HERE.parent / "src"
SHOWN_LINES = 45  # of each log, where something failed
# For a machine without a network, and a vLLM without FlashInfer.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


class Failure(Exception):
    """A process ended, or was too slow; the text says which."""


class Signalled(Failure):
    """This process was told to end."""


class Clock:
    """When all must be over; each wait takes what is left of that at most."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def within(self, most_s: float) -> float:
        return max(0.0, min(most_s, self._end - time.monotonic()))

    def part(self, share: float) -> Clock:
        """A clock for a part of the time that is left."""
        return Clock(share * (self._end - time.monotonic()))


class Process:
    """A child whose stdout is read by a thread, which ends with the child: lines that begin with `mark` are for us.

    All else goes to its log, as stderr does.
    """

    mark = ""

    def __init__(
        self,
        name: str,
        command: list[str],
        folder: pathlib.Path,
        clock: Clock,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name, self.log, self.clock = name, folder / f"{name}.log", clock
        self._lines: queue.Queue[str | None] = queue.Queue()
        path = os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
        default = {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(folder / "cache")}
        env = {**default, **os.environ, "PYTHONPATH": path, **environment}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
                start_new_session=True,  # vLLM starts processes of its own, which end with it
            )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def line(self, most_s: float, doing: str) -> str:
        """Its next line. Raises Failure where none comes."""
        wait_s = self.clock.within(most_s)
        try:
            line = self._lines.get(timeout=wait_s)
        except queue.Empty:
            raise Failure(f"the {self.name} said nothing for {wait_s:.0f} s, {doing}") from None
        if line is None:
            raise Failure(f"the {self.name} ended with {self._process.wait(10)}, {doing}")
        return line

    def say(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Failure(f"the {self.name} does not listen: {error}") from None

    def kill(self) -> None:
        """SIGKILL, without waiting."""
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        """SIGTERM, and SIGKILL where that takes long. Idempotent."""
        end_all([self])

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        self._signal(signal.SIGTERM)

    def has_ended(self, most_s: float) -> bool:
        """Whether it has, or does so soon."""
        try:
            self._process.wait(most_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        return "\n".join([f"---- the {self.name}'s log ends:", *(line[:500] for line in lines)])

    def _signal(self, number: int) -> None:
        """To it and to what it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _read(self, lines: IO[str]) -> None:
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in lines:
                if line.startswith(self.mark):
                    self._lines.put(line.removeprefix(self.mark))
                else:
                    with self.log.open("a") as log:
                        log.write(line)
        self._lines.put(None)


class Engine(Process):
    """An engine's script, asked by lines; `started` must be called before the first question."""

    mark = "ANSWER "

    def __init__(
        self,
        name: str,
        script: str,
        settings: dict[str, Any],
        folder: pathlib.Path,
        clock: Clock,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        command = [sys.executable, str(HERE / script), json.dumps(settings)]
        super().__init__(name, command, folder, clock, environment)

    def started(self, most_s: float = 100.0) -> dict[str, Any]:
        """Wait until it is up; what it is."""
        found: dict[str, Any] = self._answer(most_s, "starting")
        return found

    def ask(self, op: str, **arguments: Any) -> Any:
        self.begin(op, **arguments)
        return self.answer(op)

    def begin(self, op: str, **arguments: Any) -> None:
        """Ask without waiting for the `answer`."""
        self.say(json.dumps({"op": op, **arguments}))

    def answer(self, op: str, most_s: float = 40.0) -> Any:
        return self._answer(most_s, f"asked for {op}")

    def _answer(self, most_s: float, doing: str) -> Any:
        answer = json.loads(self.line(most_s, doing))
        if isinstance(answer, dict) and "error" in answer:
            raise Failure(f"the {self.name} failed, {doing}: {answer['error']}")
        return answer


class Server(Process):
    """`kvferry serve`; `started` must be called before it is used."""

    def __init__(self, folder: pathlib.Path, clock: Clock, *, cpu: bool, memory: str) -> None:
        socket = folder / "kv.sock"
        self.url = f"unix://{socket}"
        command = [sys.executable, "-m", "kvferry", "serve", "--socket", str(socket), "--memory", memory]
        super().__init__(
            "server", [*command, "--device", "cpu" if cpu else "cuda", "--until-stdin-closes"], folder, clock
        )

    def started(self) -> str:
        """Wait until all its memory is there; its own words."""
        return self.line(60.0, "starting").strip()


def end_all(processes: Sequence[Process]) -> None:
    """SIGTERM for all, and SIGKILL for those that need longer than 5 s. Idempotent."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + 5.0
    left = [process for process in processes if not process.has_ended(max(0.0, until - time.monotonic()))]
    for process in left:
        process.kill()
    for process in left:
        process.has_ended(10.0)


def end(number: int, frame: object) -> None:
    """For signal.signal: the way out runs over `end_all`, which no second signal (timeout sends two) cuts short."""
    signal.signal(number, signal.SIG_IGN)
    raise Signalled(f"signal {number} came")
