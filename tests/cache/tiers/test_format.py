"""The header of a chunk outside memory: what it holds, and that nothing about it can change unseen."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cache.tiers.chunks import meta_of
from kvferry.cache.tiers import ChunkMeta, ChunkName
from kvferry.cache.tiers.format import HEADER_BYTES, Header, check, decode, digest_of, encode
from kvferry.errors import ChunkCorruptError

IDS = st.binary(min_size=32, max_size=32)
METAS = st.integers(1, 2**32 - 1).flatmap(
    lambda depth: st.builds(
        ChunkMeta,
        name=st.builds(ChunkName, IDS, IDS),
        parent=IDS if depth > 1 else st.just(b""),
        depth=st.just(depth),
        nbytes=st.integers(1, 2**63 - 1),
        tenant=st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    )
)
DATA = bytes(range(256)) * 20


def sealed(fields: bytes) -> bytes:
    """A header that says `fields`, whatever they are, with a checksum that is right."""
    body = fields.ljust(HEADER_BYTES - 8, b"\0")
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def fields(**changed: object) -> bytes:
    """The fields as the format's description gives them, written here once more."""
    values: dict[str, object] = {
        "magic": b"KVFERRY\n",
        "version": 1,
        "parent_bytes": 32,
        "depth": 7,
        "nbytes": len(DATA),
        "namespace": b"n" * 32,
        "key": b"k" * 32,
        "parent": b"p" * 32,
        "digest": xxhash.xxh3_128_digest(DATA),
        "tenant_bytes": 8,
        "tenant": "uid:1000",
    } | changed
    return struct.pack("<8sHHIQ32s32s32s16sH", *list(values.values())[:-1]) + bytes(str(values["tenant"]), "latin-1")


def a_meta() -> ChunkMeta:
    return ChunkMeta(ChunkName(b"n" * 32, b"k" * 32), b"p" * 32, 7, len(DATA), "uid:1000")


def test_golden_header() -> None:
    """What is on disk and in buckets already must be readable by what comes after this version."""
    header = encode(a_meta(), digest_of(DATA))
    assert len(header) == HEADER_BYTES
    assert header[:24].hex() == "4b5646455252590a0100200007000000" + "0014000000000000"
    assert header[24:120] == b"n" * 32 + b"k" * 32 + b"p" * 32
    assert header[120:136].hex() == "87cf83cc9a055cf4f875f2fa2e99df80"
    assert header[136:146] == b"\x08\0uid:1000"
    assert not any(header[146:4088])
    assert hashlib.sha256(header).hexdigest() == "c9cd632a3480071f69d97631ae1b5b368577b83cdea2a45ca65367b420f5f648"


@given(METAS, st.binary(min_size=16, max_size=16))
def test_what_goes_in_comes_out(meta: ChunkMeta, digest: bytes) -> None:
    assert decode(encode(meta, digest)) == Header(meta, digest)


@given(METAS, st.data())
def test_any_change_of_a_header_is_seen(meta: ChunkMeta, data: st.DataObject) -> None:
    header = bytearray(encode(meta, bytes(16)))
    place = data.draw(st.integers(0, HEADER_BYTES - 1))
    header[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ChunkCorruptError):
        decode(header)


@given(st.binary(min_size=1, max_size=5000), st.data())
def test_any_change_of_the_bytes_is_seen(payload: bytes, data: st.DataObject) -> None:
    meta = replace(a_meta(), nbytes=len(payload))
    header = decode(encode(meta, digest_of(payload)))
    check(header, meta, payload)
    changed = bytearray(payload)
    changed[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ChunkCorruptError, match="checksum"):
        check(header, meta, changed)


@pytest.mark.parametrize(
    "other",
    [
        replace(a_meta(), name=ChunkName(b"m" * 32, b"k" * 32)),
        replace(a_meta(), name=ChunkName(b"n" * 32, b"l" * 32)),
        replace(a_meta(), parent=b"q" * 32),
        replace(a_meta(), depth=8),
        replace(a_meta(), nbytes=len(DATA) - 1),
        replace(a_meta(), tenant="uid:1001"),
    ],
)
def test_another_chunk_is_not_taken_for_this_one(other: ChunkMeta) -> None:
    with pytest.raises(ChunkCorruptError, match="another chunk is there"):
        check(decode(encode(other, digest_of(DATA))), a_meta(), DATA)


@given(st.integers(0, 2 * HEADER_BYTES).filter(lambda length: length != HEADER_BYTES))
def test_a_header_of_another_length_is_none(length: int) -> None:
    with pytest.raises(ChunkCorruptError, match="cut off"):
        decode((encode(a_meta(), bytes(16)) * 2)[:length])


@given(st.binary(max_size=300))
def test_noise_is_no_header(noise: bytes) -> None:
    with pytest.raises(ChunkCorruptError):
        decode(noise.ljust(HEADER_BYTES, b"\x55"))
    with pytest.raises(ChunkCorruptError):
        decode(sealed(b"KVFERRY\n" + b"\x55" + noise))


def test_the_twin_of_the_format_is_right() -> None:
    assert sealed(fields()) == encode(a_meta(), digest_of(DATA))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"magic": b"KVFERRY\0"}, "does not begin"),
        ({"version": 2}, "version 2"),
        ({"version": 0}, "version 0"),
        ({"parent_bytes": 31}, "parent"),
        ({"parent_bytes": 0}, "parent"),
        ({"depth": 1}, "parent"),
        ({"depth": 0}, "depth 0"),
        ({"nbytes": 0}, "at least one"),
        ({"nbytes": 1 << 63}, "at least one"),
        ({"tenant_bytes": 1025}, "tenant"),
        ({"tenant_bytes": 65535}, "tenant|utf-8"),
        ({"tenant": "\xff\xfe------"}, "utf-8"),
    ],
)
def test_a_rightly_sealed_header_may_still_be_wrong(changed: dict[str, object], text: str) -> None:
    with pytest.raises(ChunkCorruptError, match=text):
        decode(sealed(fields(**changed)))


@pytest.mark.parametrize(
    "meta",
    [
        replace(a_meta(), name=ChunkName(b"n" * 31, b"k" * 32)),
        replace(a_meta(), name=ChunkName(b"n" * 32, b"k" * 33)),
        replace(a_meta(), parent=b""),
        replace(meta_of(1, 5), parent=b"p" * 32),
        replace(a_meta(), depth=0),
        replace(a_meta(), depth=1 << 32),
        replace(a_meta(), nbytes=0),
        replace(a_meta(), tenant="x" * 1025),
    ],
)
def test_what_no_header_can_say_is_refused(meta: ChunkMeta) -> None:
    with pytest.raises(ValueError):
        encode(meta, bytes(16))
