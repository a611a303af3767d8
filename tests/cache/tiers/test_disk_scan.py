"""What a disk tier finds after a restart: all whole chunks, parents first, and nothing that is not its own."""

from __future__ import annotations

import contextlib
import os
import random
import stat
from pathlib import Path

import pytest

from cache.tiers.chunks import chain_of, filled, is_whole, meta_of, write
from kvferry.cache.tiers import ChunkMeta, DiskTier, StoredChunk
from kvferry.errors import ChunkMissingError, TierUnavailableError


def scanned(tier: DiskTier) -> list[StoredChunk]:
    return [chunk for batch in tier.scan() for chunk in batch]


def path_of(folder: Path, meta: ChunkMeta) -> Path:
    return folder / "kvferry-1" / meta.name.namespace.hex() / meta.name.key.hex()


def test_an_empty_folder_has_nothing(tmp_path: Path) -> None:
    with contextlib.closing(DiskTier(tmp_path / "made" / "here")) as tier:
        assert scanned(tier) == []
        assert (tier.num_torn, tier.free_bytes() > 0) == (0, True)


def test_a_folder_that_had_to_be_made_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with contextlib.closing(DiskTier(tmp_path / "made")):
            told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
            assert told == [
                f"the disk tier's folder {tmp_path}/made was not there, and was made: is its file system mounted?"
            ]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierUnavailableError, match="it is a file, and no folder"):
        DiskTier(tmp_path / "file")


def test_nobody_else_may_look(tmp_path: Path) -> None:
    with contextlib.closing(DiskTier(tmp_path / "here")) as tier:
        write(tier, meta_of(1, 100))
    made = [tmp_path / "here", *(tmp_path / "here").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


def test_a_restart_finds_all_and_parents_first(tmp_path: Path) -> None:
    trees = [meta for space in range(4) for meta in chain_of(space, 20, 100)]
    branches = [
        meta_of(1000 + place, 200, namespace=2, parent=int.from_bytes(trees[45].name.key, "big"), depth=7)
        for place in range(5)
    ]
    assert branches[0].parent == trees[45].name.key
    assert trees[45].depth == 6
    metas = trees + branches
    random.Random(3).shuffle(metas)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        for meta in metas:
            write(tier, meta)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        found = [chunk.meta for chunk in scanned(tier)]
        assert len(found) == len(metas)
        assert set(found) == set(metas)
        seen: set[tuple[bytes, bytes]] = set()
        for meta in found:
            assert not meta.parent or (meta.name.namespace, meta.parent) in seen
            seen.add(meta.name)
        assert all(is_whole(tier, meta) for meta in metas)
        assert tier.num_torn == 0


def test_batches_are_short_and_the_caller_gets_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.cache.tiers.disk._SCAN_BATCH", 8)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        for key in range(20):
            tier.write(meta_of(key, 1), filled(1, 1))
        assert [len(batch) for batch in tier.scan()] == [0, 0, 8, 8, 4]


def test_times_are_those_of_the_last_use(tmp_path: Path) -> None:
    chain = chain_of(0, 3, 100)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        for place, meta in enumerate(chain):
            write(tier, meta)
            os.utime(path_of(tmp_path, meta), ns=(place, 1000 + place))
        assert {chunk.meta: chunk.mtime_ns for chunk in scanned(tier)} == {
            meta: 1000 + place for place, meta in enumerate(chain)
        }
        assert is_whole(tier, chain[1])
        times = {chunk.meta: chunk.mtime_ns for chunk in scanned(tier)}
        assert sorted(chain, key=times.__getitem__) == [chain[0], chain[2], chain[1]]


def test_foreign_files_are_left_where_they_are(tmp_path: Path) -> None:
    meta = meta_of(1, 100)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        write(tier, meta)
    home = tmp_path / "kvferry-1"
    space = path_of(tmp_path, meta).parent
    outside = tmp_path / "outside"
    foreign = [
        outside,
        tmp_path / ("0" * 64),
        home / "README",
        home / ("f" * 64),  # a namespace's name, but a file
        home / "writing" / "notes.part",
        home / "writing" / "0a1b2c3d-1.part.bak",
        space / "README",
        space / ("A" * 64),
        space / ("0" * 63),
        space / ("0" * 64 + "x"),
    ]
    for file in foreign:
        file.write_bytes(b"somebody's")
    folders = [home / "snapshots", home / ("0" * 62), space / ("e" * 63), home / ("E" * 64)]
    for folder in folders:
        folder.mkdir()
        (folder / ("1" * 64)).write_bytes(b"somebody's")
    links = [space / ("d" * 63), home / ("d" * 64)]
    links[0].symlink_to(outside)
    links[1].symlink_to(folders[0], target_is_directory=True)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        assert [chunk.meta for chunk in scanned(tier)] == [meta]
        assert tier.num_torn == 0
    assert all(file.read_bytes() == b"somebody's" for file in foreign)
    assert all((folder / ("1" * 64)).read_bytes() == b"somebody's" for folder in folders)
    assert all(link.is_symlink() for link in links)


def test_what_is_no_file_where_a_chunk_should_be_is_torn(tmp_path: Path) -> None:
    meta = meta_of(1, 100)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        write(tier, meta)
    space = path_of(tmp_path, meta).parent
    folder, link, pipe, bound = (space / (letter * 64) for letter in "abcd")
    folder.mkdir()
    (folder / "notes").write_bytes(b"somebody's")
    (tmp_path / "outside").write_bytes(b"somebody's")
    link.symlink_to(tmp_path / "outside")
    os.mkfifo(pipe)
    os.mknod(bound, stat.S_IFSOCK | 0o600)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        assert [chunk.meta for chunk in scanned(tier)] == [meta]
        assert tier.num_torn == 4
    assert sorted(space.iterdir()) == sorted([folder, path_of(tmp_path, meta)])
    assert (folder / "notes").read_bytes() == (tmp_path / "outside").read_bytes() == b"somebody's"


def test_torn_files_are_removed_and_counted(tmp_path: Path) -> None:
    chain = chain_of(5, 8, 5000)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        for meta in chain:
            write(tier, meta)
    paths = [path_of(tmp_path, meta) for meta in chain]
    paths[0].write_bytes(b"")
    paths[1].write_bytes(paths[1].read_bytes()[:4000])
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    paths[3].write_bytes(paths[3].read_bytes() + b"x")
    paths[4].write_bytes(bytes(9096))  # as a file system may leave it after a loss of power
    paths[5].write_bytes(paths[6].read_bytes())
    other = path_of(tmp_path, meta_of(1, 1, namespace=6))
    other.parent.mkdir()
    other.write_bytes(paths[6].read_bytes())
    (tmp_path / "kvferry-1" / "writing" / "0a1b2c3d-7.part").write_bytes(b"half")
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        assert [chunk.meta for chunk in scanned(tier)] == chain[6:]
        assert tier.num_torn == 8
        assert not other.exists()
        assert [chunk.meta for chunk in scanned(tier)] == chain[6:]
        assert tier.num_torn == 8
        with pytest.raises(ChunkMissingError):
            is_whole(tier, chain[0])
    assert not list(tmp_path.glob("kvferry-1/writing/*"))
    assert len(list(tmp_path.glob("kvferry-1/*/*"))) == 2


def test_empty_namespaces_go(tmp_path: Path) -> None:
    meta = meta_of(1, 100)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        write(tier, meta)
        tier.delete([meta.name])
        assert scanned(tier) == []
        assert not path_of(tmp_path, meta).parent.exists()
        write(tier, meta)
        assert is_whole(tier, meta)


def test_a_folder_that_is_no_more_cannot_be_scanned(tmp_path: Path) -> None:
    with contextlib.closing(DiskTier(tmp_path / "here")) as tier:
        os.rename(tmp_path / "here", tmp_path / "there")
        with pytest.raises(TierUnavailableError, match="cannot be listed"):
            scanned(tier)
        with pytest.raises(TierUnavailableError, match="free space"):
            tier.free_bytes()
