"""Past the page cache or through it: the same files, whatever the memory and the file system allow."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.tiers.chunks import MIB, PAGE, filled, memory, meta_of
from kvferry.cache.tiers import DiskTier
from kvferry.cache.tiers.format import HEADER_BYTES

SIZES = [1, PAGE, MIB - 1, MIB, MIB + 1, 3 * MIB + 5000]


class Opens:
    """Of which kind each opening of a chunk's file was."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.direct: list[bool] = []
        self._open = os.open
        patch.setattr(os, "open", self)

    def __call__(self, path: Any, flags: int, *rest: Any) -> int:
        self.direct.append(bool(flags & os.O_DIRECT))
        return self._open(path, flags, *rest)


def file_of(folder: Path, key: int) -> Path:
    return next(folder.glob(f"kvferry-1/*/{key:064x}"))


@pytest.fixture
def no_direct(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system without O_DIRECT."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    try:
        mount = subprocess.run(["mount", "-t", "ramfs", "ramfs", str(folder)], capture_output=True, check=False)
        if mount.returncode != 0:
            pytest.skip(f"a ramfs cannot be mounted: {mount.stderr.decode().strip()}")
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], capture_output=True, check=False)


@pytest.mark.parametrize("nbytes", SIZES)
def test_both_ways_make_and_read_the_same_files(tmp_path: Path, nbytes: int) -> None:
    data = filled("these", nbytes)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        tier.write(meta_of(1, nbytes), data)
        direct = file_of(tmp_path, 1).read_bytes()
        assert len(direct) == HEADER_BYTES + nbytes
        assert direct[HEADER_BYTES:] == data
        for shift in (0, 1):  # at an odd address the way is through the cache
            into = memory(nbytes, shift=shift)
            tier.read(meta_of(1, nbytes), into)
            assert into == data
        tier.direct = False
        tier.write(meta_of(1, nbytes), data)
        assert file_of(tmp_path, 1).read_bytes() == direct
        tier.direct = True
        into = memory(nbytes)
        tier.read(meta_of(1, nbytes), into)
        assert into == data


@pytest.mark.parametrize(("nbytes", "shift", "expected"), [(MIB, 0, True), (MIB, 256, False), (MIB - 1, 0, False)])
def test_direct_is_for_large_chunks_in_aligned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, shift: int, expected: bool
) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no O_DIRECT in {tmp_path}: {error}")
    data = filled("these", nbytes, shift=shift)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        opens = Opens(monkeypatch)
        tier.write(meta_of(1, nbytes), data)
        tier.read(meta_of(1, nbytes), memory(nbytes, shift=shift))
        assert opens.direct == [expected, expected]
        assert tier.direct


def test_a_file_system_without_direct_is_noticed_once(no_direct: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = filled("these", MIB)
    with contextlib.closing(DiskTier(no_direct)) as tier:
        opens = Opens(monkeypatch)
        tier.write(meta_of(1, MIB), data)
        assert not tier.direct
        tier.write(meta_of(2, MIB), data)
        for key in (1, 2):
            into = memory(MIB)
            tier.read(meta_of(key, MIB), into)
            assert into == data
        assert opens.direct == [True, False, False, False, False]
        assert not list(no_direct.glob("kvferry-1/writing/*"))


def test_a_file_system_without_direct_is_noticed_when_reading(no_direct: Path) -> None:
    with contextlib.closing(DiskTier(no_direct)) as tier:
        tier.write(meta_of(1, MIB), filled("these", MIB))
        tier.direct = True
        into = memory(MIB)
        tier.read(meta_of(1, MIB), into)
        assert into == filled("these", MIB)
        assert not tier.direct
