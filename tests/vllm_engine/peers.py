"""A prefill and a decode engine of one test, and what a router does with them."""

from __future__ import annotations

import uuid
from typing import Any

from vllm_engine.processes import Engine
from vllm_engine.stage import Stage


def connector(role: str, **extra: Any) -> dict[str, Any]:
    """The --kv-transfer-config of one side."""
    return {
        "kv_connector": "P2pNcclConnector",
        "kv_connector_module_path": "kvferry.connectors.vllm",
        "kv_role": role,
        "kv_port": 0,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_buffer_size": 64 << 20, "lease_s": 20, **extra},
    }


class Peers:
    """One engine for prompts, one for answers; `prefill` and `decode` are more of their arguments."""

    def __init__(
        self, stage: Stage, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **extra: Any
    ) -> None:
        self.prefill = stage.engine(**({"connector": connector("kv_producer", **extra)} | (prefill or {})))
        self.decode = stage.engine(**({"connector": connector("kv_consumer", **extra)} | (decode or {})))

    @classmethod
    def of(cls, prefill: Engine, decode: Engine) -> Peers:
        """Two engines that there are."""
        peers = cls.__new__(cls)
        peers.prefill, peers.decode = prefill, decode
        return peers

    @classmethod
    def beside(cls, stage: Stage, prefill: Engine, **extra: Any) -> Peers:
        """Another decode engine for a prefill engine that there is."""
        return cls.of(prefill, stage.engine(connector=connector("kv_consumer", **extra)))

    def params(self, transfer_id: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """The kv_transfer_params of a request, for either engine."""
        common = {"transfer_id": transfer_id or uuid.uuid4().hex}
        mine, theirs = addresses(self.prefill), addresses(self.decode)
        return (
            {**common, "do_remote_decode": True, "remote_addresses": theirs},
            {**common, "do_remote_prefill": True, "remote_addresses": mine},
        )

    def submit(self, prompts: list[list[int]], max_tokens: int = 16) -> tuple[list[str], list[str]]:
        """Let requests come in to both; their names in either."""
        first, second = [], []
        for prompt in prompts:
            to_prefill, to_decode = self.params()
            first += submit(self.prefill, prompt, 1, to_prefill)
            second += submit(self.decode, prompt, max_tokens, to_decode)
        return first, second

    def run(self) -> None:
        """Both at once, until neither has anything to do."""
        for engine in (self.prefill, self.decode):
            engine.send({"op": "run"})
        for engine in (self.prefill, self.decode):
            assert engine.reply(90)["done"]

    def generate(self, prompts: list[list[int]], max_tokens: int = 16) -> Any:
        """What the decode engine answers."""
        _, names = self.submit(prompts, max_tokens)
        self.run()
        return self.decode.call("results", ids=names)

    def counts(self) -> dict[str, float]:
        """What both have counted."""
        return {**self.prefill.call("counts")["counts"], **self.decode.call("counts")["counts"]}


def submit(engine: Engine, prompt: list[int], max_tokens: int, params: dict[str, Any] | None, **more: Any) -> list[str]:
    """One request with kv_transfer_params."""
    sampling = {"extra_args": {"kv_transfer_params": params}} if params else {}
    ids: list[str] = engine.call("submit", prompts=[prompt], max_tokens=max_tokens, sampling=sampling, **more)["ids"]
    return ids


def addresses(engine: Engine) -> list[str]:
    """Where an engine's ranks are reached."""
    found: list[str] = engine.call("addresses")["addresses"]
    return found


def all_blocks_are_free(*engines: Engine) -> None:
    for engine in engines:
        assert engine.call("settle")["done"]
        blocks = engine.call("blocks")
        assert blocks["free"] == blocks["all"]
