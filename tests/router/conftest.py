"""A process that forks routers and fake engines, and what one test starts of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.fleet import Fleet, Zygote


@pytest.fixture(scope="session")
def router_zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def fleet(router_zygote: Zygote, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(router_zygote, tmp_path)
    yield made
    made.close()
