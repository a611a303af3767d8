"""What the tests share: one process that imports SGLang, one model, and the tokens that it gives without KVferry."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from kvferry.cli.machine import describe_machine
from sglang_engine import models
from sglang_engine.stage import Stage, Zygote
from vllm_engine.results import Results

RESULTS = pytest.StashKey[Results]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="file for figures and outcomes, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    machine = dict(describe_machine("cpu"), sglang=importlib.metadata.version("sglang"))
    config.stash[RESULTS] = Results(machine)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" or report.failed:
        item.config.stash[RESULTS].tests[item.nodeid] = report.outcome
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--results")
    if path is not None:
        session.config.stash[RESULTS].write(path, bench="sglang")


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config) -> Results:
    return pytestconfig.stash[RESULTS]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def stage(zygote: Zygote, model: Path, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(zygote, tmp_path, model)
    yield made
    made.close()
