"""Run the phases of scripts/gpu-run, each in a process of its own with a time limit, and sum them up.

Each phase leaves `<phase>.json` (or `.txt` where it printed no JSON) in the results folder; `summary.json` says on what
machine, with which versions, and which phases failed. The exit code is the number of failed phases.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

PYTHON = sys.executable


@dataclass(frozen=True)
class Phase:
    """One command, for machines with so many GPUs; `json` says that its standard output is one JSON object."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    json: bool = True
    gpus: int = 1


FOLDER = pathlib.Path("tests/gpu")
PYTEST = (PYTHON, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", "--durations=10")
ARGUMENTS = tuple(shlex.split(os.environ.get("KVFERRY_PYTEST_ARGS", "")))
FROM_ENGINE_TO_ENGINE = tuple(sorted(str(path) for name in ("p2p", "nccl") for path in FOLDER.glob(f"test_{name}*.py")))
OTHERS = tuple(f"--ignore={path}" for path in FROM_ENGINE_TO_ENGINE)
BENCH_P2P = (PYTHON, "-m", "kvferry", "bench", "p2p", "--device", "cuda", "--json", "--carrier")
PHASES = (
    Phase("tests", (*PYTEST, str(FOLDER), *OTHERS, *ARGUMENTS), 300, json=False),
    Phase("tests-p2p", (*PYTEST, *FROM_ENGINE_TO_ENGINE, *ARGUMENTS), 580, json=False),
    Phase("demo", (PYTHON, "-m", "kvferry", "demo", "--device", "cuda", "--json"), 90),
    Phase("demo-p2p", (PYTHON, "-m", "kvferry", "demo", "--p2p", "--device", "cuda", "--json"), 120, gpus=2),
    Phase("bench-p2p-ipc", (*BENCH_P2P, "ipc"), 240, gpus=2),
    Phase("bench-p2p-nccl", (*BENCH_P2P, "nccl"), 240, gpus=2),
    Phase("bench-ipc", (PYTHON, "-m", "kvferry", "bench", "ipc", "--device", "cuda", "--json"), 120),
    Phase("bench-store", (PYTHON, "-m", "kvferry", "bench", "store", "--device", "cuda", "--json"), 150),
    Phase("bench-copy", (PYTHON, "benchmarks/copy_cuda.py", "--rounds", "5"), 60),
    Phase("matrix", (PYTHON, "benchmarks/namespaces.py", "--json"), 150),
)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = (
        subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.split("\n")[0].strip()
    )
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpus": devices,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def run(phase: Phase, results: pathlib.Path, num_gpus: int) -> dict[str, Any]:
    """Run one phase; what it printed goes to the results folder, the end of it to our own output if it failed."""
    if num_gpus < phase.gpus:
        return {"phase": phase.name, "code": 0, "seconds": 0.0, "result": f"needs {phase.gpus} GPUs, sees {num_gpus}"}
    began = time.monotonic()
    try:
        done = subprocess.run(phase.command, capture_output=True, text=True, timeout=phase.limit_s, check=False)
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as slow:
        code = 124
        out, err = (x.decode(errors="replace") if isinstance(x, bytes) else x or "" for x in (slow.stdout, slow.stderr))
    record: dict[str, Any] = {"phase": phase.name, "code": code, "seconds": round(time.monotonic() - began, 1)}
    suffix = "json" if phase.json and code == 0 else "txt"
    (results / f"{phase.name}.{suffix}").write_text(out if suffix == "json" else f"{out}\n--- stderr\n{err}")
    if phase.json and out.strip():
        try:
            record["result"] = json.loads(out)
        except ValueError:
            record["code"] = code or 65
    if record["code"]:
        print(f"=== {phase.name} failed with {record['code']}\n{out[-6000:]}\n{err[-4000:]}", flush=True)
    if not phase.json:
        record["result"] = out.strip().rsplit("\n", 1)[-1].strip("= ")
        if " passed" not in record["result"]:
            record["code"] = code or 65  # all skipped: this Python sees no GPU, and nothing was tested
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", out, re.MULTILINE)
        if failed:
            record["failed"] = failed
    return record


def lines(record: dict[str, Any]) -> list[str]:
    """The record as rows of the closing table."""
    head = f"{record['phase']:12} {'ok' if record['code'] == 0 else 'FAILED':7} {record['seconds']:6.1f} s"
    result = record.get("result")
    if isinstance(result, str):
        return [f"{head}  {result}"]
    rows = [head]
    for row in (result or {}).get("results", []):
        limit = "" if row.get("limit") is None else f"  limit {row['limit']:.4g}"
        ratio = "" if row.get("ratio") is None else f"  ratio {row['ratio']:.3f}"
        rows.append(f"    {row['name']:34} {row['value']:12.4g} {row['unit']:6}{limit}{ratio}")
    if record["phase"].startswith("demo") and isinstance(result, dict):
        rows += [f"    {key:34} {value}" for key, value in result.items() if not isinstance(value, list | dict)]
    if record["phase"] == "matrix" and isinstance(result, dict):
        rows += [f"    {row['mechanism']:10} {row['namespaces']:16} {row['outcome'][:90]}" for row in result["matrix"]]
    return rows


def main(names: list[str]) -> int:
    known = {phase.name: phase for phase in PHASES}
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"unknown phases {unknown}; there are {list(known)}")
        return 2
    results = pathlib.Path(os.environ.get("KVFERRY_RESULTS") or "build/gpu-results")
    results.mkdir(parents=True, exist_ok=True)
    found = machine()
    phases = [run(known[name], results, len(found["gpus"])) for name in names or known]
    summary = {"machine": found, "phases": phases}
    (results / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary["machine"]))
    for record in summary["phases"]:
        print("\n".join(lines(record)))
    return sum(1 for record in summary["phases"] if record["code"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
