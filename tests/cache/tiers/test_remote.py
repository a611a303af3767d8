"""The remote tier against a real S3 endpoint, and by a folder: hosts that share it, damage, what cannot be opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from obstore.store import S3Store

from cache.tiers.chunks import MIB, chain_of, is_whole, meta_of, write
from cache.tiers.conftest import S3
from kvferry.cache.tiers import ChunkName
from kvferry.cache.tiers import remote as remote_module
from kvferry.cache.tiers.format import HEADER_BYTES
from kvferry.cache.tiers.remote import RemoteTier
from kvferry.errors import ChunkCorruptError, ChunkMissingError, TierError, TierUnavailableError
from serving.process import eventually

_OTHER_HOST = """
import json, sys
from cache.tiers.chunks import chain_of, is_whole, write
from kvferry.cache.tiers.remote import RemoteTier
tier = RemoteTier(sys.argv[1], options=json.loads(sys.stdin.readline()), timeout_s=20)
chain = chain_of(1, 6, 2 << 20)
assert tier.find([meta.name for meta in chain]) == 3
assert all(is_whole(tier, meta) for meta in chain[:3])
for meta in chain[3:5]:
    write(tier, meta)
tier.delete([chain[0].name])
"""


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_hosts_share_what_is_there(kind: str, s3: S3, tmp_path: Path) -> None:
    url = s3.url() if kind == "s3" else f"file://{tmp_path}"
    tier = s3.tier(url) if kind == "s3" else RemoteTier(url)
    chain = chain_of(1, 6, 2 * MIB)
    for meta in chain[:3]:
        write(tier, meta)
    options = "{}"
    if kind == "s3":
        options = "{" + ",".join(f'"{key}":"{value}"' for key, value in s3.options.items()) + "}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _OTHER_HOST, url]
    run = subprocess.run(command, input=options + "\n", text=True, env=environment, timeout=50, check=False)
    assert run.returncode == 0
    assert tier.find([meta.name for meta in chain]) == 0
    assert tier.find([meta.name for meta in chain[1:]]) == 4
    assert all(is_whole(tier, meta) for meta in chain[1:5])
    with pytest.raises(ChunkMissingError):
        is_whole(tier, chain[0])


def test_exactly_what_was_damaged_is_corrupt(tmp_path: Path) -> None:
    tier = RemoteTier(f"file://{tmp_path}")
    chain = chain_of(1, 8, 10_000)
    for meta in chain:
        write(tier, meta)
    paths = [tmp_path / "kvferry-1" / meta.name.namespace.hex() / meta.name.key.hex() for meta in chain]
    one, other = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(other)
    paths[2].write_bytes(one)
    flipped = bytearray(paths[4].read_bytes())
    flipped[HEADER_BYTES + 9999] ^= 1
    paths[4].write_bytes(flipped)
    os.truncate(paths[6], HEADER_BYTES + 9999)
    corrupt = []
    for place, meta in enumerate(chain):
        try:
            assert is_whole(tier, meta)
        except ChunkCorruptError:
            corrupt.append(place)
    assert corrupt == [1, 2, 4, 6]


@pytest.mark.parametrize(("present", "most"), [(0, 1), (64, 2), (1, 8), (40, 8), (63, 8)])
def test_find_asks_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: int, most: int) -> None:
    tier = RemoteTier(f"file://{tmp_path}")
    chain = chain_of(1, 64, 10)
    for meta in chain[:present]:
        write(tier, meta)
    asked = []
    has = RemoteTier._has

    def count(self: RemoteTier, name: ChunkName) -> bool:
        asked.append(name)
        return has(self, name)

    monkeypatch.setattr(RemoteTier, "_has", count)
    assert tier.find([meta.name for meta in chain]) == present
    assert len(asked) <= most


def test_objects_lie_where_they_are_said_to(s3: S3) -> None:
    url = s3.url()
    meta = meta_of(5, 100, namespace=6)
    write(s3.tier(url), meta)
    options: Any = s3.options
    bucket = S3Store("chunks", config=options, client_options={"allow_http": True})
    path = f"{url.removeprefix('s3://chunks/')}/kvferry-1/{6:064x}/{5:064x}"
    assert bucket.head(path)["size"] == HEADER_BYTES + 100


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_a_namespace_goes_whole_and_alone(kind: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = s3.tier() if kind == "s3" else RemoteTier(f"file://{tmp_path}")
    mine, others = chain_of(1, 12, 10), chain_of(2, 2, 10)
    for meta in mine + others:
        write(tier, meta)
    foreign = tmp_path / "kvferry-1" / f"{1:064x}" / "README"
    if kind == "file":
        foreign.write_bytes(b"somebody's")
    monkeypatch.setattr(remote_module, "_PAGE", 5)
    pages: list[int] = []
    size = 12 * (10 + HEADER_BYTES)
    assert tier.namespace_bytes(mine[0].name.namespace, lambda: pages.append(1)) == size
    assert 1 <= len(pages) <= 3  # a folder comes as one
    tier.delete_namespace(mine[0].name.namespace, lambda: pages.append(2))
    assert pages.count(2) == 2 * pages.count(1)
    assert tier.namespace_bytes(mine[0].name.namespace) == 0
    assert [tier.find([meta.name]) for meta in mine] == [0] * 12
    assert all(is_whole(tier, meta) for meta in others)
    assert kind == "s3" or foreign.read_bytes() == b"somebody's"
    tier.delete_namespace(mine[0].name.namespace)


def test_what_a_page_raises_ends_a_deletion(s3: S3) -> None:
    tier = s3.tier()
    chain = chain_of(1, 2, 10)
    for meta in chain:
        write(tier, meta)

    def stop() -> None:
        raise TierUnavailableError("the server ends")

    with pytest.raises(TierUnavailableError, match="the server ends"):
        tier.delete_namespace(chain[0].name.namespace, stop)
    assert is_whole(tier, chain[0])


def test_what_a_killed_server_was_writing_to_a_folder_goes(tmp_path: Path) -> None:
    code = """
import sys
from cache.tiers.chunks import meta_of, write
from kvferry.cache.tiers.remote import RemoteTier
tier = RemoteTier(f"file://{sys.argv[1]}")
write(tier, meta_of(0, 1000))
while True:
    write(tier, meta_of(1, 32 << 20))
"""
    writing, first = tmp_path / "kvferry-1" / "writing", tmp_path / "kvferry-1" / f"{0:064x}" / f"{0:064x}"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        eventually(lambda: first.exists() and any(writing.iterdir()), 30)
    finally:
        child.kill()
        child.wait(20)
    (writing / "f00-1#1").touch()  # the kill may have come between two writes
    for path in writing.iterdir():
        os.utime(path, (1, 1))
    (writing / "another-hosts").touch()
    tier = RemoteTier(f"file://{tmp_path}")
    write(tier, meta_of(2, 1000))
    assert [path.name for path in writing.iterdir()] == ["another-hosts"]
    assert {len(path.name) for path in tmp_path.rglob("*") if path.is_file()} == {64, len("another-hosts")}
    assert all(is_whole(tier, meta_of(key, 1000)) for key in (0, 2))


def test_a_folder_in_an_objects_place_leaves_nothing_behind(tmp_path: Path) -> None:
    tier = RemoteTier(f"file://{tmp_path}")
    (tmp_path / "kvferry-1" / f"{1:064x}" / f"{1:064x}" / "x").mkdir(parents=True)
    with pytest.raises(TierError):
        write(tier, meta_of(1, 1000, namespace=1))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_bucket_that_does_not_exist_is_named(s3: S3) -> None:
    tier = s3.tier("s3://no-such-bucket/here")
    meta = meta_of(1, 10)
    for call in (
        lambda: write(tier, meta),
        lambda: is_whole(tier, meta),
        lambda: tier.delete([meta.name]),
        lambda: tier.delete_namespace(meta.name.namespace),
    ):
        with pytest.raises(TierUnavailableError, match=r"s3://no-such-bucket/here.*(does not exist|NoSuchBucket)"):
            call()


@pytest.mark.parametrize("option", ["endpoint", "AWS_ENDPOINT_URL", "aws_endpoint_url_s3"])
def test_an_endpoint_where_nobody_listens(option: str) -> None:
    options = {option: "http://127.0.0.1:9", "access_key_id": "AKIA", "secret_access_key": "never-to-be-seen"}
    tier = RemoteTier("s3://bucket", options=options, timeout_s=2)
    with pytest.raises(TierUnavailableError, match=r"HEAD kvferry-1/.* at s3://bucket failed: connection refused"):
        tier.find([meta_of(1, 1).name])


def test_an_endpoint_without_tls_from_the_environment_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(TierUnavailableError, match="allow_http=true"):
        RemoteTier("s3://bucket").find([meta_of(1, 1).name])
    with pytest.raises(TierUnavailableError, match="connection refused"):
        RemoteTier("s3://bucket", options={"allow_http": "true"}).find([meta_of(1, 1).name])


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("gs://bucket/x", {}, "gs://bucket/x is of no known kind"),
        ("/folder", {}, "no known kind"),
        ("s3:///prefix", {}, "names no bucket"),
        ("file://host/folder", {}, "names no folder of this host"),
        ("file:///", {}, "names no folder of this host"),
        ("s3://me:hidden@bucket/x", {}, "s3://bucket/x has more than bucket and path"),
        ("s3://bucket/x?hidden=hidden", {}, "s3://bucket/x has more than bucket and path"),
        ("s3://bucket", {"timeout": "hidden"}, "remote option timeout is not for setting"),
        ("s3://bucket", {"AWS_BUCKET": "hidden"}, "remote option AWS_BUCKET is not for setting"),
        ("s3://bucket", {"secret": "hidden"}, "with the options secret: there is no secret"),
        ("s3://bucket", {"allow_http": "hidden"}, "a value is not of its kind"),
        ("s3://bucket", {"aws_allow_http": "hidden"}, "a value is not of its kind"),
        ("s3://bucket", {"pool_idle_timeout": "hidden"}, "a value is not of its kind"),
        ("s3://bucket", {"access_key_id": "hidden"}, "belong together"),
        ("s3://bucket", {"root_certificate": "hidden"}, "cannot be opened with the options root_certificate"),
        ("file:///tmp/kvferry-not-made", {"secret": "hidden"}, "takes no remote options; it got secret"),
        ("file:///proc/self/nothing/here", {}, "cannot be opened: No such file or directory"),
    ],
)
def test_what_cannot_be_opened(url: str, options: dict[str, str], text: str) -> None:
    with pytest.raises(TierError, match=text) as caught:
        RemoteTier(url, options=options)
    assert "hidden" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_without_obstore_the_way_to_get_it_is_named() -> None:
    code = """
import sys
sys.modules["obstore"] = None
from kvferry.cache.tiers.remote import RemoteTier
from kvferry.errors import TierError
try:
    RemoteTier("s3://bucket")
except TierError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40, check=False)
    assert "pip install 'kvferry[remote]'" in run.stdout, run.stderr
