"""A cache server and SGLang engines on it, for one test; and the tokens of an engine without KVferry."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from vllm_engine import processes
from vllm_engine.processes import Engine, Server


class Zygote(processes.Zygote):
    """Forks engines and servers, of SGLang's kind."""

    module = "sglang_engine.engine_zygote"
    import_s = 300.0


class Stage:
    """A cache server and engines on it, for one test; ends all of them."""

    def __init__(self, zygote: Zygote, folder: Path, model: Path) -> None:
        self._zygote = zygote
        self._model = model
        self.folder = folder
        self._numbers = itertools.count()
        self._engines: list[Engine] = []
        self._server: Server | None = None

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    def serve(self, *options: str) -> Server:
        self._server = Server(self._zygote, self.folder / "kv.sock", *options)
        return self._server

    @property
    def url(self) -> str:
        return f"unix://{self.folder / 'kv.sock'}"

    def hicache(self, *, layout: str = "page_first", policy: str = "wait_complete", **extra: Any) -> dict[str, Any]:
        """The arguments of an engine with KVferry as its storage; `extra` are KVferry's own settings and SGLang's."""
        config = {
            "backend_name": "kvferry",
            "module_path": "kvferry.connectors.sglang",
            "class_name": "KVFerryStorage",
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": True,
            "prefetch_threshold": 16,
            "staging_bytes": 4 << 20,
            "url": self.url,
            **extra,
        }
        return {
            "enable_hierarchical_cache": True,
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(config),
            "hicache_storage_prefetch_policy": policy,
            "hicache_mem_layout": layout,
            "hicache_io_backend": "direct" if layout == "page_first_direct" else "kernel",
        }

    def linker(self, **extra: Any) -> dict[str, Any]:
        """The arguments of an engine with KVferry as its external linker."""
        config = {
            "linker": "KVFerryLinker",
            "linker_module_path": "kvferry.connectors.sglang",
            "linker_extra_config": {"url": self.url, **extra},
        }
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": config,
        }

    def route(self, name: str, **extra: Any) -> dict[str, Any]:
        """The arguments of either way, "hicache" or "linker"."""
        return self.hicache(**extra) if name == "hicache" else self.linker(**extra)

    def wait_for_pages(self, count: int) -> None:
        """Return when the server has so many pages, of all ranks together."""
        processes.eventually(lambda: self.server.stats()["chunks"] >= count, 60)

    def engine(self, *, model: Path | None = None, **arguments: Any) -> Engine:
        """An engine; without a route's arguments it has nothing to do with KVferry."""
        engine = self._zygote.start(
            model=str(model or self._model),
            log=self.folder / f"engine-{next(self._numbers)}.log",
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
            if self._server is not None:
                self._server.close()
