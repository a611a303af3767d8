"""S5 on a GPU: the server is killed while it copies 4 GiB into a cache; once the engine knows, no byte of it lands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.process import Zygote
from soak.killed_server import BLOCK_BYTES, kill_in_retrieve

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

NUM_BYTES = 4 << 30


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


def test_nothing_lands_after_the_server_was_killed_in_a_retrieve_of_4_gib(zygote: Zygote, tmp_path: Path) -> None:
    seen = kill_in_retrieve(zygote, tmp_path, device="cuda:0", num_bytes=NUM_BYTES)
    for once in seen:
        if once["error"] is not None:
            assert "ServerGoneError" in once["error"]
            assert once["failed"] == NUM_BYTES // BLOCK_BYTES
            assert once["changed"] == []
    assert 0 < seen[-1].get("landed", 0) < NUM_BYTES // BLOCK_BYTES, f"no kill met the copy in the middle: {seen}"
