"""Servers with lower tiers, engines on them, and what they have on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.layout import chain_hashes
from serving.engine_side import CHUNK_BLOCKS, CHUNK_TOKENS, prompt
from serving.process import Side, Stage, Zygote, eventually

CHUNK = 65_536
MakeStage = Callable[..., Stage]


@pytest.fixture
def make_stage(zygote: Zygote, tmp_path: Path) -> Iterator[MakeStage]:
    """Makes servers with 16 MiB of memory and 64 MiB of disk, if nothing else is said."""
    made: list[Stage] = []

    def make(folder: str = "a", **config: Any) -> Stage:
        (tmp_path / folder).mkdir(exist_ok=True)
        if "remote_url" not in config:
            config = {"disk_path": str(tmp_path / "disk"), "disk_bytes": 64 << 20, **config}
        made.append(Stage(zygote, tmp_path / folder, **config))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def restart(stage: Stage, **config: Any) -> None:
    """Kill the server and start another one in its place."""
    stage.server.kill()
    eventually(lambda: not stage.server.alive)
    stage._config.update(config)
    stage.start_server()


def store(engine: Side, seed: int, chunks: int) -> list[str]:
    """Store a prompt; what its blocks held."""
    blocks = list(range(chunks * CHUNK_BLOCKS))
    held: list[str] = engine.call("fill", blocks=blocks, seed=seed)["digest"]
    engine.call("store", seed=seed, num_tokens=chunks * CHUNK_TOKENS, blocks=blocks)
    return held


def load(engine: Side, seed: int, chunks: int, held: list[str], wait_s: float = 20.0) -> int:
    """How many chunks of a prompt come back; each byte of them is right."""
    found = engine.call("lookup", seed=seed, num_tokens=chunks * CHUNK_TOKENS, wait_s=wait_s, request=f"{seed}")
    hit = found["tokens"] // CHUNK_TOKENS
    if hit:
        engine.call("wipe")
        blocks = list(range(100, 100 + hit * CHUNK_BLOCKS))
        assert engine.call("retrieve", lease=found["lease"], blocks=blocks) == {"failed": [], "error": None}
        assert engine.call("digest", blocks=blocks)["digest"] == held[: hit * CHUNK_BLOCKS]
    return int(hit)


def stats(engine: Side) -> dict[str, float]:
    values: dict[str, float] = engine.call("stats")["stats"]
    return values


def settle(engine: Side, name: str = "disk") -> dict[str, float]:
    """Wait until the tiers have ended with all that there is; the stats then."""
    eventually(lambda: not stats(engine)["writes"] and not stats(engine)[f"{name}_queue"])
    return stats(engine)


def started(stage: Stage, **arguments: Any) -> Side:
    """An engine, once all memory can be used and the disk has been read."""
    engine = stage.engine(num_blocks=192, **arguments)
    wait_until_ready(stage, engine)
    return engine


def wait_until_ready(stage: Stage, engine: Side) -> None:
    eventually(lambda: engine.call("connected")["connected"])
    stage.wait_for_memory(engine)
    eventually(lambda: not stats(engine).get("disk_scanning"))


def files(stage: Stage) -> dict[str, Path]:
    """The files of all chunks, by the keys."""
    return {path.name: path for path in Path(stage._config["disk_path"]).glob("kvferry-1/*/*") if len(path.name) == 64}


def key_of(seed: int, chunk: int) -> str:
    """The key of a prompt's chunk, counted from 1."""
    return chain_hashes(prompt(seed, chunk * CHUNK_TOKENS), CHUNK_TOKENS)[-32:].hex()


def file_of(stage: Stage, seed: int, chunk: int) -> Path:
    """The file of a prompt's chunk, counted from 1."""
    return files(stage)[key_of(seed, chunk)]
