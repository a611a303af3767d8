"""A server that is killed while it writes: what its successor finds is whole, and nothing is left lying about."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from cache.tiers.chunks import is_whole, meta_of, write
from kvferry.cache.tiers import DiskTier

_WRITER = """
import itertools, os, sys, threading
from cache.tiers.chunks import filled, meta_of
from kvferry.cache.tiers import DiskTier
tier = DiskTier(sys.argv[1])
first = int(sys.argv[2])
NBYTES = 1 << 20
chunks = [(meta_of(first + n, NBYTES), filled(meta_of(first + n, NBYTES).name, NBYTES)) for n in range(4)]
def run(own):
    for meta, data in itertools.cycle(own):
        tier.write(meta, data)
        os.write(1, b'%d\\n' % meta.name.key[-1])  # in one piece, for there are two threads
for number in range(2):
    threading.Thread(target=run, args=(chunks[number::2],), daemon=True).start()
sys.stdin.read()
"""

_ROUNDS = 3
_CHUNKS_A_ROUND = 4


def start_writer(folder: Path, first: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder), str(first)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def kill(process: subprocess.Popen[bytes]) -> set[int]:
    """SIGKILL; the keys of the chunks that had been written."""
    process.kill()
    with process:
        assert process.stdout is not None
        lines = process.stdout.read().split(b"\n")[:-1]
        process.wait(20)
    return {int(line) for line in lines if line}


def test_a_kill_leaves_whole_chunks_and_no_temporary_file(tmp_path: Path) -> None:
    rng = random.Random(7)
    parts = tmp_path / "kvferry-1" / "writing"
    num_swept = 0
    reported: set[int] = set()
    for number in itertools.count():
        if number >= _ROUNDS and (num_swept or number == 10 * _ROUNDS):
            break
        writer = start_writer(tmp_path, number * _CHUNKS_A_ROUND)
        assert writer.stdout is not None
        reported.add(int(writer.stdout.readline()))
        deadline = time.monotonic() + 0.2 * rng.random()
        while time.monotonic() < deadline or not os.listdir(parts):  # the kill is to hit a write, if it can
            assert writer.poll() is None
        reported |= kill(writer)
        left = len(os.listdir(parts))
        with contextlib.closing(DiskTier(tmp_path)) as tier:
            assert tier.num_torn == left
            num_swept += left
            assert os.listdir(parts) == []
            found = [chunk.meta for batch in tier.scan() for chunk in batch]
            assert tier.num_torn == left  # a file that has a chunk's name is whole
            assert all(is_whole(tier, meta) for meta in found)
            assert {meta.name.key[-1] for meta in found} >= reported
    assert num_swept > 0


def test_a_write_that_never_gets_its_name_is_no_chunk(tmp_path: Path) -> None:
    """Killed between the last byte and the rename."""
    code = """
import os, sys
from cache.tiers.chunks import meta_of, write
from kvferry.cache.tiers import DiskTier
tier = DiskTier(sys.argv[1])
write(tier, meta_of(1, 5000))
os.rename = lambda *paths: os.kill(os.getpid(), 9)
write(tier, meta_of(2, 5000))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, timeout=40, check=False)
    assert run.returncode == -9
    assert [file.stat().st_size for file in tmp_path.glob("kvferry-1/writing/*")] == [9096]
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        assert tier.find([meta_of(1, 1).name, meta_of(2, 1).name]) == 1
        assert [chunk.meta for batch in tier.scan() for chunk in batch] == [meta_of(1, 5000)]
        assert tier.num_torn == 1
        assert not list(tmp_path.glob("kvferry-1/writing/*"))
        write(tier, meta_of(2, 5000))
        assert is_whole(tier, meta_of(2, 5000))
