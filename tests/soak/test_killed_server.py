"""S5 on the host backend: once a retrieve has failed because the server died, no byte of it lands any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.process import Zygote
from soak.killed_server import BLOCK_BYTES, kill_in_retrieve

NUM_BYTES = 192 << 20


@pytest.mark.timeout(120)
def test_nothing_lands_after_the_server_was_killed_in_a_retrieve(zygote: Zygote, tmp_path: Path) -> None:
    seen = kill_in_retrieve(zygote, tmp_path, device="cpu", num_bytes=NUM_BYTES)
    for once in seen:
        if once["error"] is not None:
            assert "ServerGoneError" in once["error"]
            assert once["failed"] == NUM_BYTES // BLOCK_BYTES
            assert once["changed"] == []
    assert 0 < seen[-1].get("landed", 0) < NUM_BYTES // BLOCK_BYTES, f"no kill met the copy in the middle: {seen}"
