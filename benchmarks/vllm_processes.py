"""The processes of benchmarks/vllm_reuse.py: engines and their cache server, none of them waited for without end."""

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


class Clock:
    """When all must be over; each wait takes what is left of that at most."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def within(self, most_s: float) -> float:
        return max(0.0, min(most_s, self._end - time.monotonic()))


class Process:
    """A child whose stdout is read by a thread, which ends with the child: lines that begin with `mark` are for us.

    All else goes to its log, as stderr does.
    """

    mark = ""

    def __init__(self, name: str, command: list[str], folder: pathlib.Path, clock: Clock) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self._clock = clock
        self._lines: queue.Queue[str | None] = queue.Queue()
        path = os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(folder / "cache"), **os.environ, "PYTHONPATH": path}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def line(self, most_s: float, doing: str) -> str:
        """Its next line. Raises Failure where none comes."""
        wait_s = self._clock.within(most_s)
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
        self._process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """SIGTERM, and SIGKILL where that takes long. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        return "\n".join([f"---- the {self.name}'s log ends:", *(line[:500] for line in lines)])

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
    """benchmarks/vllm_engine_child.py, asked by lines; `started` must be called before the first question."""

    mark = "ANSWER "

    def __init__(self, name: str, settings: dict[str, Any], folder: pathlib.Path, clock: Clock) -> None:
        command = [sys.executable, str(HERE / "vllm_engine_child.py"), json.dumps(settings)]
        super().__init__(name, command, folder, clock)

    def started(self) -> dict[str, Any]:
        """Wait until it is up; what it is."""
        found: dict[str, Any] = self._answer(100.0, "starting")
        return found

    def ask(self, op: str, **arguments: Any) -> Any:
        self.say(json.dumps({"op": op, **arguments}))
        return self._answer(40.0, f"asked for {op} {arguments}")

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
