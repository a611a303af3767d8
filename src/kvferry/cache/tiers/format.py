"""How a chunk is kept outside memory: one page of header, then its bytes. Files and objects of a bucket are the same.

The header says what the bytes are (name, place in the chain, owner, length) and holds two checksums, of the bytes and
of itself, so that a torn, damaged or exchanged object is known as such whatever it is called. The checksums find
accidents; somebody who may write to the folder or the bucket can forge them.

Little-endian, in this order: magic (8 bytes), version (u16), length of the parent's key (u16: 0 or 32), depth (u32),
number of bytes (u64), namespace (32), key (32), parent's key (32), XXH3-128 of the bytes (16), length of the tenant's
name (u16), the name in UTF-8, zeros up to byte 4088, XXH3-64 of all before it (u64).
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

import xxhash

from kvferry.cache.tiers.tier import ChunkMeta, ChunkName
from kvferry.errors import ChunkCorruptError

Buffer: TypeAlias = "bytes | bytearray | memoryview"

HEADER_BYTES = 4096
VERSION = 1
ID_BYTES = 32
MAX_TENANT_BYTES = 1024
MAX_DEPTH = (1 << 32) - 1

_MAGIC = b"KVFERRY\n"
_FIELDS = struct.Struct("<8sHHIQ32s32s32s16sH")
_SEAL = struct.Struct("<Q")
_SEALED_BYTES = HEADER_BYTES - _SEAL.size
_NO_PARENT = bytes(ID_BYTES)


class Header(NamedTuple):
    """What a header says: the chunk, and the checksum that its bytes must have."""

    meta: ChunkMeta
    digest: bytes


def digest_of(data: Buffer) -> bytes:
    """The checksum of a chunk's bytes. Lets other threads run meanwhile."""
    return xxhash.xxh3_128_digest(data)


def encode(meta: ChunkMeta, digest: bytes) -> bytes:
    """The header of a chunk whose bytes have `digest`. Raises ValueError for a meta that no header can hold."""
    _check_meta(meta)
    tenant = meta.tenant.encode()
    namespace, key = meta.name
    parent = meta.parent or _NO_PARENT
    fields = _FIELDS.pack(
        *(_MAGIC, VERSION, len(meta.parent), meta.depth, meta.nbytes, namespace, key, parent, digest, len(tenant))
    )
    sealed = (fields + tenant).ljust(_SEALED_BYTES, b"\0")
    return sealed + _SEAL.pack(xxhash.xxh3_64_intdigest(sealed))


def decode(header: Buffer) -> Header:
    """What a header says. Raises ChunkCorruptError where it is none, or a damaged one."""
    if len(header) != HEADER_BYTES:
        raise ChunkCorruptError(f"the header has {len(header)} bytes instead of {HEADER_BYTES}: it is cut off")
    header = bytes(header)
    magic, version, parent_bytes, depth, nbytes, namespace, key, parent, digest, tenant_bytes = _FIELDS.unpack_from(
        header
    )
    if magic != _MAGIC:
        raise ChunkCorruptError("it does not begin as a KVferry chunk does")
    if _SEAL.unpack_from(header, _SEALED_BYTES)[0] != xxhash.xxh3_64_intdigest(header[:_SEALED_BYTES]):
        raise ChunkCorruptError("the header's checksum does not match it")
    if version != VERSION:
        raise ChunkCorruptError(f"its format is of version {version}; this is version {VERSION}")
    name = header[_FIELDS.size : _FIELDS.size + tenant_bytes]
    try:
        meta = ChunkMeta(ChunkName(namespace, key), parent[:parent_bytes], depth, nbytes, name.decode())
        _check_meta(meta)
    except ValueError as error:  # sealed rightly, so whoever wrote it was wrong
        raise ChunkCorruptError(f"the header holds what no chunk has: {error}") from None
    return Header(meta, digest)


def check(header: Header, meta: ChunkMeta, data: Buffer) -> None:
    """Raise ChunkCorruptError unless the header is that of `meta`, and `data` the bytes that it was written with."""
    if header.meta != meta:
        raise ChunkCorruptError(f"another chunk is there: {describe(header.meta)} instead of {describe(meta)}")
    if digest_of(data) != header.digest:
        raise ChunkCorruptError(f"the checksum of its {len(data)} bytes does not match them")


def describe(meta: ChunkMeta) -> str:
    """A chunk in an error's text: short, and the same wherever it is named."""
    namespace, key = meta.name
    return f"chunk {key.hex()[:16]} of {namespace.hex()[:16]} (depth {meta.depth}, {meta.nbytes} bytes, {meta.tenant})"


def _check_meta(meta: ChunkMeta) -> None:
    """Raise ValueError for what no chunk has; the same going out and coming in."""
    if len(meta.name.namespace) != ID_BYTES or len(meta.name.key) != ID_BYTES:
        raise ValueError(
            f"a name of {len(meta.name.namespace)} and {len(meta.name.key)} bytes; both parts have {ID_BYTES}"
        )
    if len(meta.parent) != (0 if meta.depth == 1 else ID_BYTES):
        raise ValueError(f"a parent's key of {len(meta.parent)} bytes at depth {meta.depth}")
    if not 1 <= meta.depth <= MAX_DEPTH:
        raise ValueError(f"depth {meta.depth}; it counts from 1")
    if not 1 <= meta.nbytes < 1 << 63:
        raise ValueError(f"{meta.nbytes} bytes; a chunk has at least one")
    if len(meta.tenant.encode()) > MAX_TENANT_BYTES:
        raise ValueError(f"a tenant's name of {len(meta.tenant.encode())} bytes; at most {MAX_TENANT_BYTES}")
