"""What benchmarks/vllm_pd.py does with a prefill and a decode engine that are up."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from typing import Any

from vllm_figures import TOKENS, same
from vllm_processes import Engine

FIRST_SEED = 1000
TOKEN_REPS = {"sequential": 3, "at_once": 2}
WARM_S = 60.0
SHUFFLED = 31, 32  # the seeds of either engine


class NoTransfer(Exception):
    """The decode engine has answered, but its KV has not come from the prefill engine."""


class Pair:
    """A prefill and a decode engine, and what a router does with them."""

    def __init__(self, kind: str, prefill: Engine, decode: Engine) -> None:
        self.kind = kind
        self.engines = self._prefill, self._decode = prefill, decode
        self._addresses: list[list[str]] = []
        self._seeds = itertools.count(FIRST_SEED)  # no prompt comes twice: engines know prefixes

    @property
    def ways(self) -> tuple[str, ...]:
        """NIXL's decode engine must be told what the prefill engine has answered."""
        return ("sequential",) if self.kind == "nixl" else ("sequential", "at_once")

    def started(self, most_s: float) -> dict[str, Any]:
        """Wait until both are up; what the prefill engine is."""
        prefill, decode = (engine.started(most_s) for engine in self.engines)
        self._addresses = [found.pop("addresses", []) for found in (prefill, decode)]
        return prefill

    def warm(self, lengths: list[int]) -> None:
        """Let both compute prompts of these lengths, till `warmed`."""
        for engine in self.engines:
            engine.begin("warm", lengths=lengths)

    def warmed(self) -> None:
        for engine in self.engines:
            engine.answer("warm", WARM_S)

    def arrange(self, blocks: str) -> None:
        """Let free blocks be `fresh` or `shuffled` in both."""
        for engine, seed in zip(self.engines, SHUFFLED, strict=True):
            engine.ask("settle", most_s=5.0)
            engine.ask("arrange", seed=seed if blocks == "shuffled" else None)

    def sequential(self, length: int, tokens: int = 1, *, asked: int | None = None) -> dict[str, Any]:
        """Prefill, then decode: the decode engine gets what the prefill engine has answered.

        `asked` is another prompt, for the decode engine.
        """
        seed = next(self._seeds)
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.kind != "nixl":
            params["transfer_id"] = uuid.uuid4().hex
        first = self._prefill.ask("request", seed=seed, length=length, tokens=1, params=params)
        if not first["params"]:
            raise NoTransfer("the prefill engine's answer has no kv_transfer_params")
        answer = {"seed": seed if asked is None else asked, "length": length, "tokens": tokens}
        second = self._decode.ask("request", **answer, params=first["params"])
        return _run(first, second) | {"seed": seed}

    def at_once(self, length: int, tokens: int = 1) -> dict[str, Any]:
        """Both get the request from the start, the decode engine a moment earlier."""
        seed = next(self._seeds)
        request = {"seed": seed, "length": length}
        prefill, decode = self._addresses
        common = {"transfer_id": uuid.uuid4().hex}
        awaits = {**common, "do_remote_prefill": True, "remote_addresses": prefill}
        sends = {**common, "do_remote_decode": True, "remote_addresses": decode}
        self._decode.begin("request", **request, tokens=tokens, params=awaits)
        self._prefill.begin("request", **request, tokens=1, params=sends)
        first, second = self._prefill.answer("request"), self._decode.answer("request")
        run = _run(first, second) | {"seed": seed}
        if first["last_layer_s"] is None:
            raise NoTransfer("the prefill engine has sent nothing")
        run["began_before_last_layer"] = second["transfers"][-1]["began_s"] < first["last_layer_s"]
        run["transfer_ms"] = (second["transfers"][-1]["landed_s"] - first["last_layer_s"]) * 1e3
        run["ttft_ms"] = (second["first_s"] - min(first["started_s"], second["started_s"])) * 1e3
        return run

    def own(self, seed: int, length: int) -> list[int]:
        """The prefill engine's tokens over its own prefix cache."""
        found = self._prefill.ask("generate", seed=seed, length=length, tokens=TOKENS)
        return list(found["tokens"])

    def alone(self, length: int) -> float:
        """The decode engine's time for a prompt that it computes itself."""
        return float(self._decode.ask("generate", seed=next(self._seeds), length=length, tokens=1)["ms"])

    def control(self, length: int) -> dict[str, Any]:
        """KV of another prompt comes, under the right transfer id."""
        asked = next(self._seeds)
        for engine in (self._prefill, self._decode):
            engine.ask("take_any_kv")
        run = self.sequential(length, TOKENS, asked=asked)
        self.own(asked, length)  # computed; then from its cache, as all that is compared
        return {"equal": same(self.own(asked, length), run["tokens"]), "cached": run["cached"]}


def measure(pair: Pair, lengths: dict[str, int], reps: int, found: dict[str, Any]) -> None:
    """Fill `found`. A stage in which no KV comes ends, and the next begins; what else fails ends the kind."""

    def stage(name: str, call: Callable[[], Any]) -> None:
        try:
            found["stages"][name] = call() or "done"
        except NoTransfer as error:
            found["stages"][name] = f"failed: {error}"
            print(f"{pair.kind}, {name}: {error}", flush=True)

    for blocks in ("fresh", "shuffled"):
        pair.arrange(blocks)
        for name, length in lengths.items():
            for way in pair.ways:
                labels = {"prompt": name, "blocks": blocks, "way": way}
                stage(f"{name}_{blocks}_{way}", lambda: _times(pair, labels, length, reps, found["runs"]))  # noqa: B023
    found["peers"] = pair.engines[1].ask("peers")
    found["equal"], found["alone_ms"] = {}, {}
    for name, length in lengths.items():
        for way in pair.ways:
            stage(f"{name}_{way}_tokens", lambda: _tokens(pair, f"{name}_{way}", length, way, found["equal"]))  # noqa: B023
    for name, length in lengths.items():
        stage(f"{name}_alone", lambda: found["alone_ms"].update({name: [pair.alone(length) for _ in range(reps)]}))  # noqa: B023
    stage("control", lambda: found.update(control=pair.control(lengths["8k"])))


def _times(pair: Pair, labels: dict[str, str], length: int, reps: int, runs: list[dict[str, Any]]) -> None:
    """The first run meets the peer, or new shapes, and does not count."""
    for rep in range(reps + 1):
        run = getattr(pair, labels["way"])(length)
        runs.append({**labels, "counts": rep > 0, **run})


def _tokens(pair: Pair, name: str, length: int, way: str, equal: dict[str, list[int]]) -> None:
    for _ in range(TOKEN_REPS[way]):
        run = getattr(pair, way)(length, TOKENS)
        equal.setdefault(name, []).append(same(pair.own(run["seed"], length), run["tokens"]))


def _run(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a request's two halves. Raises NoTransfer."""
    transfers = second["transfers"]
    if not transfers:
        raise NoTransfer(f"nothing was received; {second['cached']} tokens came from caches")
    if transfers[-1]["error"] is not None:
        raise NoTransfer(transfers[-1]["error"])
    return {
        "prefill_ms": first["ms"],
        "decode_ms": second["ms"],
        "transfer_ms": transfers[-1]["ms"],
        "transfers": transfers,
        "cached": second["cached"],
        "steps": second["steps"],
        "tokens": second["tokens"],
    }
