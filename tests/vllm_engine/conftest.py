"""What the tests share: one process that imports vLLM, one model, and the tokens that it gives without KVferry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_engine import models
from vllm_engine.stage import Reference, Stage, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def reference(zygote: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    engine = zygote.start(model=str(model), log=str(tmp_path_factory.mktemp("reference") / "log"))
    yield Reference(engine)
    engine.end()


@pytest.fixture
def stage(zygote: Zygote, model: Path, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(zygote, tmp_path, model)
    yield made
    made.close()
