"""Fixtures over servers and engines in processes of their own; a conftest imports what it wants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.process import Stage, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks servers and engines, for the whole run."""
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def stage(zygote: Zygote, tmp_path: Path) -> Iterator[Stage]:
    """A server with 16 MiB (256 chunks of the engines' 64 KiB), and engines on it."""
    made = Stage(zygote, tmp_path)
    yield made
    made.close()
