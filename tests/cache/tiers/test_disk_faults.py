"""A disk that fills, vanishes, rots, or belongs to somebody else: which error, and that work goes on after it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache.tiers.chunks import MIB, chain_of, filled, is_whole, memory, meta_of, write
from kvferry.cache.tiers import ChunkMeta, DiskTier
from kvferry.errors import ChunkCorruptError, ChunkMissingError, TierError, TierFullError, TierUnavailableError


def path_of(folder: Path, meta: ChunkMeta) -> Path:
    return folder / "kvferry-1" / meta.name.namespace.hex() / meta.name.key.hex()


def corrupt(tier: DiskTier, metas: list[ChunkMeta]) -> list[ChunkMeta]:
    """Those that are not as they were written."""
    found = []
    for meta in metas:
        try:
            assert is_whole(tier, meta)
        except ChunkCorruptError:
            found.append(meta)
    return found


def in_child(code: str, *arguments: object) -> str:
    """Run `code` in a process of its own; what it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
        run = subprocess.run(mount, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            pytest.skip(f"a tmpfs cannot be mounted: {run.stderr.strip()}")
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], capture_output=True, check=False)


def test_exactly_what_was_damaged_is_corrupt(tmp_path: Path) -> None:
    sessions = [chain_of(space, 8, 10_000) for space in range(3)]
    chunks = [meta for chain in sessions for meta in chain]
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        for meta in chunks:
            write(tier, meta)
        swapped = [path_of(tmp_path, sessions[0][2]), path_of(tmp_path, sessions[1][5])]
        os.rename(swapped[0], tmp_path / "aside")
        os.rename(swapped[1], swapped[0])
        os.rename(tmp_path / "aside", swapped[1])
        with open(path_of(tmp_path, sessions[2][0]), "r+b") as file:
            file.seek(4096 + 7777)
            byte = file.read(1)[0]
            file.seek(4096 + 7777)
            file.write(bytes([byte ^ 0x10]))
        os.truncate(path_of(tmp_path, sessions[2][7]), 4096 + 9999)
        assert corrupt(tier, chunks) == [sessions[0][2], sessions[1][5], sessions[2][0], sessions[2][7]]


def test_a_full_disk_takes_stores_again_once_there_is_room(small_disk: Path) -> None:
    chunks = [meta_of(key, MIB) for key in range(20)]
    with contextlib.closing(DiskTier(small_disk)) as tier:
        stored = []
        for meta in chunks:
            with contextlib.suppress(TierFullError):
                write(tier, meta)
                stored.append(meta)
        assert 6 <= len(stored) <= 7
        assert not list(small_disk.glob("kvferry-1/writing/*"))
        assert tier.free_bytes() < 2 * MIB
        with pytest.raises(TierFullError, match=f"chunk .* was not written below {small_disk}: No space left"):
            write(tier, chunks[19])
        assert corrupt(tier, stored) == []
        tier.delete([meta.name for meta in stored[:3]])
        for meta in chunks[17:]:
            write(tier, meta)
        assert corrupt(tier, stored[3:] + chunks[17:]) == []
        for file in small_disk.glob("kvferry-1/*/????????????????????????????????????????????????????????????????"):
            file.unlink()  # not by us
        with pytest.raises(ChunkMissingError):
            is_whole(tier, chunks[19])
        for meta in chunks[:5]:
            write(tier, meta)
        assert corrupt(tier, chunks[:5]) == []


def test_a_file_that_may_not_grow_is_a_full_disk(tmp_path: Path) -> None:
    code = """
import contextlib, os, resource, sys
from cache.tiers.chunks import is_whole, meta_of, write
from kvferry.cache.tiers import DiskTier
from kvferry.errors import TierFullError
tier = DiskTier(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    write(tier, meta_of(1, 2 << 20))
except TierFullError as error:
    print(error)
write(tier, meta_of(2, 1000))
assert is_whole(tier, meta_of(2, 1000))
assert not os.listdir(sys.argv[1] + "/kvferry-1/writing")
tier.close()
"""
    assert "File too large" in in_child(code, tmp_path)


def test_the_folder_is_made_anew_when_somebody_deletes_it(tmp_path: Path) -> None:
    chunks = [meta_of(key, 1000) for key in range(3)]
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        write(tier, chunks[0])
        shutil.rmtree(tmp_path / "kvferry-1")
        with pytest.raises(ChunkMissingError):
            is_whole(tier, chunks[0])
        assert tier.find([chunks[0].name]) == 0
        tier.delete([chunks[0].name])
        write(tier, chunks[1])
        assert is_whole(tier, chunks[1])
        shutil.rmtree(tmp_path / "kvferry-1" / "writing")
        write(tier, chunks[2])
        assert is_whole(tier, chunks[2])
        with pytest.raises(TierUnavailableError, match="another server"):  # the new folder is locked, too
            DiskTier(tmp_path)
    DiskTier(tmp_path).close()


def test_a_path_that_goes_is_not_made_anew_and_may_come_back(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with contextlib.closing(DiskTier(here)) as tier:
        write(tier, meta_of(1, 1000))
        os.rename(here, there)
        with pytest.raises(TierUnavailableError, match=f"{here}/kvferry-1 has gone, and cannot be made anew"):
            write(tier, meta_of(2, 1000))
        assert not here.exists()
        os.rename(there, here)
        write(tier, meta_of(2, 1000))
        assert corrupt(tier, [meta_of(1, 1000), meta_of(2, 1000)]) == []


def test_nothing_is_written_below_a_mount_that_has_gone(small_disk: Path) -> None:
    with contextlib.closing(DiskTier(small_disk)) as tier:
        subprocess.run(["umount", "-l", str(small_disk)], check=True)
        with pytest.raises(TierUnavailableError, match=f"{small_disk} is on another file system than at the start"):
            write(tier, meta_of(1, 1000))
        assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_no_file_is_corrupt(tmp_path: Path, kind: str) -> None:
    meta = meta_of(1, 1000)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        write(tier, meta)
        path = path_of(tmp_path, meta)
        os.rename(path, tmp_path / "aside")
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(tmp_path / "aside")
        else:
            os.mkfifo(path)
        with pytest.raises(ChunkCorruptError):
            is_whole(tier, meta)
        assert tier.find([meta.name]) == 0
        if kind == "folder":
            (path / "something").touch()
            with pytest.raises(TierError, match="cannot be written: Is a directory; remove what is there") as raised:
                write(tier, meta)
            assert raised.type is TierError  # not a fault of the disk
            tier.delete([meta.name])
        else:
            write(tier, meta)
            assert is_whole(tier, meta)
        assert not list(tmp_path.glob("kvferry-1/writing/*"))
    assert (tmp_path / "aside").stat().st_size == 4096 + 1000
    assert (path / "something").exists() == (kind == "folder")


def test_a_file_in_place_of_a_namespace_is_a_fault_of_its_chunks_only(tmp_path: Path) -> None:
    ours, other = meta_of(1, 1000), meta_of(2, 1000, namespace=3)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        path_of(tmp_path, other).parent.write_bytes(b"somebody's")
        with pytest.raises(TierError, match="Not a directory") as raised:
            write(tier, other)
        assert raised.type is TierError
        assert tier.find([other.name]) == 0
        tier.delete([other.name])
        write(tier, ours)
        assert is_whole(tier, ours)


def test_a_file_that_may_not_be_read_is_corrupt_and_left_alone() -> None:
    """Root may read all, so somebody else has to try."""
    code = """
import os, sys
from cache.tiers.chunks import is_whole, meta_of, write
from kvferry.cache.tiers import DiskTier
from kvferry.errors import ChunkCorruptError, TierUnavailableError
if os.geteuid() == 0:
    os.chown(sys.argv[1], 65534, 65534)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
path = sys.argv[1] + "/chunks"
tier = DiskTier(path)
for key in (1, 2):
    write(tier, meta_of(key, 1000))
hidden = f"{path}/kvferry-1/{0:064x}/{1:064x}"
os.chmod(hidden, 0)
try:
    is_whole(tier, meta_of(1, 1000))
except ChunkCorruptError as error:
    assert "Permission denied" in str(error), error
    print("corrupt")
print([chunk.meta.name.key[-1] for batch in tier.scan() for chunk in batch], tier.num_torn, os.path.exists(hidden))
os.chmod(f"{path}/kvferry-1/{0:064x}", 0o500)
for call in (lambda: write(tier, meta_of(3, 1000)), lambda: tier.delete([meta_of(2, 1).name])):
    try:
        call()
    except TierUnavailableError as error:
        assert "Permission denied" in str(error), error
        print("unavailable")
tier.close()
os.chmod(path, 0o500)
try:
    DiskTier(path + "/kvferry-1/writing/x/../../../new")
except TierUnavailableError as error:
    print(error)
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is closed to others
        os.chmod(folder, 0o755)
        lines = in_child(code, folder).splitlines()
    assert lines[:4] == ["corrupt", "[2] 0 True", "unavailable", "unavailable"]
    assert "cannot be used for chunks" in lines[4]
    assert "Permission denied" in lines[4]


def test_a_namespace_that_cannot_be_listed_does_not_hide_the_others() -> None:
    """Root may list all, so somebody else has to try."""
    code = """
import os, sys
from cache.tiers.chunks import meta_of, write
from kvferry.cache.tiers import DiskTier
if os.geteuid() == 0:
    os.chown(sys.argv[1], 65534, 65534)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
path = sys.argv[1] + "/chunks"
tier = DiskTier(path)
for key in range(6):
    write(tier, meta_of(key, 1000, namespace=key))
with os.scandir(path + "/kvferry-1") as entries:
    folders = [entry.path for entry in entries if len(entry.name) == 64]
for folder in (folders[0], folders[3]):
    os.chmod(folder, 0)
print(sum(len(batch) for batch in tier.scan()), tier.num_unlisted, tier.num_torn)
for folder in (folders[0], folders[3]):
    os.chmod(folder, 0o700)
print(sum(len(batch) for batch in tier.scan()), tier.num_unlisted, tier.num_torn)
tier.close()
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is closed to others
        os.chmod(folder, 0o755)
        assert in_child(code, folder).splitlines() == ["4 2 0", "6 0 0"]


def test_a_second_server_is_refused_by_name(tmp_path: Path) -> None:
    code = """
import os, sys
from kvferry.cache.tiers import DiskTier
tier = DiskTier(sys.argv[1])
print(os.getpid(), flush=True)
sys.stdin.read()
"""
    first = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout is not None
    assert first.stdin is not None
    try:
        assert int(first.stdout.readline()) == first.pid
        with pytest.raises(TierUnavailableError, match=rf"{tmp_path} is used by another server \(pid {first.pid}\)"):
            DiskTier(tmp_path)
    finally:
        first.kill()
        first.wait(20)
        first.stdin.close()
        first.stdout.close()
    DiskTier(tmp_path).close()


def test_a_server_whose_folder_was_deleted_leaves_it_to_the_next_one(tmp_path: Path) -> None:
    old, new = meta_of(1, 1000), meta_of(2, 1000)
    with contextlib.closing(DiskTier(tmp_path)) as first:
        write(first, old)
        shutil.rmtree(tmp_path / "kvferry-1")
        with contextlib.closing(DiskTier(tmp_path)) as second:
            write(second, new)
            calls: list[Callable[[], object]] = [
                first.free_bytes,
                lambda: write(first, old),
                lambda: is_whole(first, new),
                lambda: first.find([new.name]),
                lambda: first.delete([new.name]),
                lambda: list(first.scan()),
            ]
            for call in calls:
                with pytest.raises(TierUnavailableError, match=rf"used by another server \(pid {os.getpid()}\)"):
                    call()
            assert is_whole(second, new)
            assert [chunk.meta for batch in second.scan() for chunk in batch] == [new]
        assert first.free_bytes() > 0  # its own again
        write(first, old)
        with pytest.raises(TierUnavailableError, match="another server"):
            DiskTier(tmp_path)


@pytest.mark.parametrize("where", ["a file", "below a file"])
def test_a_path_that_is_no_folder_is_refused(tmp_path: Path, where: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    with pytest.raises(TierUnavailableError, match="cannot be used for chunks"):
        DiskTier(file if where == "a file" else file / "below")


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kvferry-1").mkdir()
    (tmp_path / "kvferry-1").chmod(0o770)
    with pytest.raises(TierUnavailableError, match=f"owned by uid {os.geteuid()} with mode 40770"):
        DiskTier(tmp_path)


def test_a_tier_that_nobody_closed_says_so(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    with pytest.warns(ResourceWarning, match="was not closed"):
        del tier
    DiskTier(tmp_path).close()


def test_memory_is_not_written_beyond_its_end(tmp_path: Path) -> None:
    """The tail of a file comes in a page of its own; the rest of that page must stay out."""
    around = memory(8192 + 5000 + 4096)
    around[:] = b"\xee" * len(around)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        tier.write(meta_of(1, 5000), filled("these", 5000))
        tier.read(meta_of(1, 5000), around[8192 : 8192 + 5000])
    assert around[:8192] == b"\xee" * 8192
    assert around[8192 + 5000 :] == b"\xee" * 4096
