from __future__ import annotations

from pathlib import Path

import pytest

from doubles.nccl_double import build


@pytest.fixture(scope="session")
def nccl_so(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The double of NCCL, built once."""
    return build(tmp_path_factory.mktemp("nccl"))
