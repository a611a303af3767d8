"""What the soak tests rest on: wrong bytes are seen and named, and nothing that is written down is lost by a kill."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from soak.blocks import LEFT_ALONE_S, Blocks
from soak.board import Board, Journal, read_journal
from soak.content import PLANES, Content, PagedBytes

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture
def content() -> Content:
    return Content(layout=0, blocks_a_chunk=4, row_bytes=256)


@pytest.fixture
def memory() -> PagedBytes:
    return PagedBytes(list(torch.zeros(2, 2, 32, 1, 8, 8).unbind(0)), 32)


def test_the_right_bytes_are_right_and_every_chunk_has_others(content: Content, memory: PagedBytes) -> None:
    memory.write([5, 2, 9, 7], content.chunk(KEY))
    assert content.differences(KEY, memory.read([5, 2, 9, 7]), [True] * 4) == []
    rows = [content.chunk(KEY), content.chunk(OTHER), Content(1, 4, 256).chunk(KEY)]
    rows = [row.reshape(4 * PLANES, -1) for row in rows]
    assert len({row.tobytes() for part in rows for row in part}) == 3 * 4 * PLANES


def test_one_wrong_byte_is_found(content: Content) -> None:
    held = content.chunk(KEY)
    held[2, 3, 200] ^= 1
    (wrong,) = content.differences(KEY, held, [True] * 4)
    assert (wrong["nth"], wrong["plane"], wrong["first_byte"], wrong["wrong_bytes"]) == (2, 3, 200, 1)
    assert content.differences(KEY, held, [True, True, False, True]) == []


def test_another_chunks_bytes_are_named(content: Content) -> None:
    held = content.chunk(KEY)
    held[1] = content.chunk(OTHER)[3]
    (wrong,) = content.differences(KEY, held, [True] * 4)
    assert f"key {OTHER[:16].hex()}.. layout 0 block 3 plane 0" in wrong["holds"]
    held[1] = 7
    assert content.differences(KEY, held, [True] * 4)[0]["holds"] == "only bytes 0x07"


def test_a_block_in_which_something_landed_is_written_down(memory: PagedBytes, tmp_path: Path) -> None:
    row = Board(tmp_path / "board", 1, create=True).rows[0]
    journal = Journal(tmp_path / "journal", "e0")
    blocks = Blocks(memory, range(32), row=row, journal=journal, dice=random.Random(0))
    taken = blocks.take(8)
    blocks.use_elsewhere(taken[:4], "its server died")
    blocks.give_back(taken[4:])
    blocks.check()
    assert row.get("blocks_left_alone") == 0
    memory.write([taken[2]], np.full((1, PLANES, 256), 0xF0, dtype=np.uint8))
    blocks.check(all_of_them=True)
    memory.mark([0], 1)  # a guard
    blocks.check()
    late, guard = read_journal(tmp_path / "journal")
    assert (late["block"], late["engine"]) == (taken[2], "e0")
    assert "its server died" in late["what"]
    assert guard["block"] == 0
    assert row.get("blocks_left_alone") == 4
    assert LEFT_ALONE_S >= 1
    journal.close()


def test_what_is_written_down_outlives_a_sigkill(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 2, create=True)
    program = f"""
import os, pathlib, signal
from soak.board import Board, Journal
folder = pathlib.Path({str(tmp_path)!r})
row = Board(folder / "board", 2).rows[1]
row.add("stores", 3)
row.at("store")
row.note_now("hit_at")
Journal(folder / "journal", "e1").error("store", code="x")
os.kill(os.getpid(), signal.SIGKILL)
"""
    tests = Path(__file__).resolve().parents[1]
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=tests, timeout=50, check=False).returncode
        == -signal.SIGKILL
    )
    assert board.totals()["stores"] == 3
    assert board.points() == ["idle", "store"]
    assert board.latest("hit_at") > 0
    assert board.latest("served_at") == 0
    assert [(entry["what"], entry["code"]) for entry in read_journal(tmp_path / "journal")] == [("store", "x")]
