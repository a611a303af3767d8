"""The clients of `kvferry bench server`, forked from one process that has imported everything: 64 cost little."""

from __future__ import annotations

import os
import pathlib
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvferry.client import CacheClient
from kvferry.errors import DeadlineError
from kvferry.reference.process import answer_lines

__all__ = ["BLOCK_SIZE", "Churn", "Exit", "Lookups", "NUM_TOKENS", "Pings", "lookup_prompt"]

NUM_TOKENS, BLOCK_SIZE = 16_384, 16
CHURN_BLOCKS, CHURN_TOKENS, CHURN_HEADS = 64, 1024, 16  # 64 KiB a chunk, 1 MiB a prompt
ACTIONS_A_SESSION = 200
START_S = 60.0


class _Command(msgspec.Struct, frozen=True, tag_field="command", tag=str.lower, forbid_unknown_fields=True):
    """One line from the bench. `clients` processes do it for `seconds`. Replies count, p50_s, p99_s, wall_s."""

    url: str
    clients: int
    seconds: float


class Lookups(_Command, frozen=True):
    """Look all of `lookup_prompt` up for engine `engine_id`, as a new request each time; the release is not timed."""

    engine_id: str


class Pings(_Command, frozen=True):
    """Empty round trips."""


class Churn(_Command, frozen=True):
    """Live as engines do: register, look up, retrieve, store, hang up, come back."""


class Exit(msgspec.Struct, frozen=True, tag_field="command", tag=str.lower):
    """End."""


def lookup_prompt() -> npt.NDArray[np.int32]:
    """The tokens that are looked up."""
    return np.random.default_rng(1).integers(0, 1 << 17, NUM_TOKENS, dtype=np.int32)


def handle(command: Any) -> dict[str, Any]:
    """Fork the clients, let them begin together, and sum up what they timed."""
    if isinstance(command, Exit):
        return {}
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder, _Crowd(command, pathlib.Path(folder)) as crowd:
        times, wall_s = crowd.run()
    p50_s, p99_s = np.quantile(times, (0.5, 0.99)).tolist()
    return {"count": len(times), "wall_s": wall_s, "p50_s": p50_s, "p99_s": p99_s}


class _Crowd:
    """Clients in processes of their own. They say when they are connected, begin together, and leave files of times."""

    def __init__(self, command: _Command, folder: pathlib.Path) -> None:
        self._command, self._folder = command, folder
        self._ready, ready = os.pipe()
        gate, self._gate = os.pipe()
        self._pidfds: list[tuple[int, int]] = []
        for number in range(command.clients):
            pid = os.fork()
            if pid == 0:
                os.close(self._gate)  # else the gate would not open while this process lives
                _live(command, number, gate=gate, ready=ready, path=folder / f"{number}.npy")
            self._pidfds.append((pid, os.pidfd_open(pid)))
        os.close(ready)
        os.close(gate)

    def __enter__(self) -> _Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for pid, pidfd in self._pidfds:  # none are left where all went well
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pidfd)
        for fd in (self._ready, self._gate):
            if fd >= 0:
                os.close(fd)

    def run(self) -> tuple[npt.NDArray[np.float64], float]:
        """Open the gate; all that was timed, and the seconds until the last client has ended.

        Raises RuntimeError where a client failed, DeadlineError where one is stuck.
        """
        deadline = time.monotonic() + START_S
        for _ in self._pidfds:
            _await(self._ready, deadline)
            if not os.read(self._ready, 1):
                raise RuntimeError("a client could not start; see its messages above")
        os.close(self._gate)
        self._gate = -1
        started = time.monotonic()
        deadline = time.monotonic() + self._command.seconds + START_S
        while self._pidfds:
            pid, pidfd = self._pidfds[-1]
            _await(pidfd, deadline)
            self._pidfds.pop()
            os.close(pidfd)
            if os.waitpid(pid, 0)[1]:
                raise RuntimeError("a client failed; see its messages above")
        wall_s = time.monotonic() - started
        return np.concatenate([np.load(path) for path in self._folder.iterdir()]), wall_s


def _await(fd: int, deadline: float) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        raise DeadlineError("a client did not start, or end, in time")


def _live(command: _Command, number: int, *, gate: int, ready: int, path: pathlib.Path) -> None:
    """The forked process; does not return."""
    status = 1
    try:
        with CacheClient(command.url, timeout_s=START_S) as client:
            action = _ACTIONS[type(command)](client, command, number)
            action()
            os.write(ready, b"r")
            os.close(ready)
            os.read(gate, 1)  # comes to its end when the gate opens, and when the bench dies
            until = time.perf_counter() + command.seconds
            times = []
            while time.perf_counter() < until:
                times.append(action())
            np.save(path, np.asarray(times, dtype=np.float64))
        status = 0
    except Exception:  # noqa: BLE001 - whatever it is, the bench ends with it
        traceback.print_exc()
    finally:
        os._exit(status)


def _lookups(client: CacheClient, command: Lookups, number: int) -> Callable[[], float]:
    tokens, requests = lookup_prompt(), iter(range(1 << 60))
    if not client.attach(command.engine_id):
        raise ValueError(f"engine {command.engine_id!r} is not there")

    def look_up() -> float:
        name, prompt = f"{number}-{next(requests)}", tokens.copy()
        started = time.perf_counter()
        found = client.lookup(name, prompt)
        took = time.perf_counter() - started
        client.release(found.lease_id)
        client.end_request(name)
        if found.tokens != NUM_TOKENS:
            raise ValueError(f"{found.tokens} of {NUM_TOKENS} stored tokens found")
        return took

    return look_up


def _pings(client: CacheClient, command: Pings, number: int) -> Callable[[], float]:
    def ping() -> float:
        started = time.perf_counter()
        client.ping()
        return time.perf_counter() - started

    return ping


def _churn(client: CacheClient, command: Churn, number: int) -> Callable[[], float]:
    engine = _ChurningEngine(command.url, number)
    return engine.act


class _ChurningEngine:
    """An engine of the `Churn` load. Prompts are few, so that some are found, and more than the server keeps."""

    def __init__(self, url: str, number: int) -> None:
        self._url, self._number = url, number
        self._random = np.random.default_rng(number)
        self._actions = 0
        self._client: CacheClient | None = None

    def act(self) -> float:
        """Look a prompt up; retrieve what is there, store what is not. Seconds of all of it."""
        started = time.perf_counter()
        client = self._connected()
        prompt = np.random.default_rng(int(self._random.integers(200))).integers(0, 1 << 17, CHURN_TOKENS)
        blocks = self._random.permutation(CHURN_BLOCKS).tolist()
        name = f"{self._actions}"
        found = client.lookup(name, prompt)
        if found.tokens and self._random.integers(4):
            client.retrieve(found.lease_id, blocks).wait(START_S)
        client.release(found.lease_id)
        client.end_request(name)
        if found.tokens < CHURN_TOKENS:
            client.store(prompt, blocks, found.tokens).wait(START_S)
        return time.perf_counter() - started

    def _connected(self) -> CacheClient:
        """The client; every so often a new one with a new cache."""
        if self._client is not None and self._actions % ACTIONS_A_SESSION == 0:
            self._client.close()
            self._client = None
        self._actions += 1
        if self._client is None:
            self._client = CacheClient(self._url, timeout_s=START_S)
            self._client.register_kv_caches(
                {"layers.0": torch.zeros((2, CHURN_BLOCKS, BLOCK_SIZE, CHURN_HEADS, 8), dtype=torch.float32)},
                engine_id=f"churn-{self._number}",
                model="bench-churn",
                format="vllm_flash_attention",
            )
        return self._client


_ACTIONS: dict[type[_Command], Callable[[CacheClient, Any, int], Callable[[], float]]] = {
    Lookups: _lookups,
    Pings: _pings,
    Churn: _churn,
}


def main() -> None:
    answer_lines(Lookups | Pings | Churn | Exit, handle, Exit)


if __name__ == "__main__":
    main()
