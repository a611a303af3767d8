"""What benchmarks/vllm_pd.py has found, as figures and checks."""

from __future__ import annotations

import statistics
from typing import Any

from vllm_figures import TOKENS, figure

AIM_8K_MS = 3.2


def summarize(kinds: dict[str, Any], *, cpu: bool) -> list[dict[str, Any]]:
    """Medians. `limit` is the aim, or what the decode engine takes without the other one."""
    aims = {} if cpu else {"8k": AIM_8K_MS}
    figures = []
    for kind, found in kinds.items():
        alone = {name: statistics.median(times) for name, times in found.get("alone_ms", {}).items()}
        groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for run in found["runs"]:
            if run["counts"]:
                groups.setdefault((run["prompt"], run["blocks"], run["way"]), []).append(run)
        for (prompt, blocks, way), runs in groups.items():
            figures += _of_group(f"{kind}_{prompt}_{blocks}", way, runs, alone.get(prompt), aims.get(prompt))
        figures += [figure(f"{kind}_{prompt}_alone_ttft", value) for prompt, value in alone.items()]
    return figures


def checks(kinds: dict[str, Any]) -> dict[str, Any]:
    """How many tokens are equal, prompt by prompt; all must be, but for the control, where few may."""
    found: dict[str, Any] = {"of": TOKENS, "ok": bool(kinds)}
    for kind, of_kind in kinds.items():
        equal, control = of_kind.get("equal", {}), of_kind.get("control", {}).get("equal")
        failed = [name for name, how in of_kind["stages"].items() if how != "done"]
        whole = bool(equal) and all(count == TOKENS for counts in equal.values() for count in counts)
        ok = whole and control is not None and control < TOKENS // 2 and not failed and of_kind["error"] is None
        found[kind] = {**equal, "control": control, "failed": failed, "error": of_kind["error"], "ok": ok}
        found["ok"] = found["ok"] and ok
    return found


def _of_group(
    name: str, way: str, runs: list[dict[str, Any]], alone: float | None, aim: float | None
) -> list[dict[str, Any]]:
    def median(key: str) -> float:
        return float(statistics.median(run[key] for run in runs))

    if way == "at_once":
        return [
            figure(f"{name}_transfer_at_once", median("transfer_ms"), aim),
            figure(f"{name}_ttft_at_once", median("ttft_ms"), alone),
        ]
    rates = [sum(one["bytes"] for one in run["transfers"]) / run["transfer_ms"] * 1e3 / 2**30 for run in runs]
    found = [
        figure(f"{name}_transfer", median("transfer_ms"), aim),
        figure(f"{name}_rate", statistics.median(rates), unit="GiB/s"),
        figure(f"{name}_decode_ttft", median("decode_ms"), alone),
        figure(f"{name}_prefill_ttft", median("prefill_ms")),
        figure(f"{name}_ttft", statistics.median(run["prefill_ms"] + run["decode_ms"] for run in runs), alone),
    ]
    if "copies" in runs[0]["transfers"][-1]:
        copies = statistics.median(run["transfers"][-1]["copies"] for run in runs)
        found.append(figure(f"{name}_copies", copies, unit=""))
    return found
