"""Chunks to put into tiers, and memory for them."""

from __future__ import annotations

import mmap
import random

from kvferry.cache.tiers import ChunkMeta, ChunkName, Tier

PAGE = 4096
MIB = 1 << 20


def memory(nbytes: int, *, shift: int = 0) -> memoryview:
    """`nbytes` of zeros, `shift` bytes after the beginning of a page."""
    return memoryview(mmap.mmap(-1, nbytes + shift))[shift:]


def filled(seed: object, nbytes: int, *, shift: int = 0) -> memoryview:
    """Bytes that follow from `seed`."""
    view = memory(nbytes, shift=shift)
    view[:] = random.Random(str(seed)).randbytes(nbytes)
    return view


def name_of(namespace: int, key: int) -> ChunkName:
    return ChunkName(namespace.to_bytes(32, "big"), key.to_bytes(32, "big"))


def meta_of(key: int, nbytes: int, *, namespace: int = 0, parent: int | None = None, depth: int = 1) -> ChunkMeta:
    above = b"" if parent is None else name_of(namespace, parent).key
    return ChunkMeta(name_of(namespace, key), above, depth, nbytes, "uid:1000")


def chain_of(namespace: int, length: int, nbytes: int) -> list[ChunkMeta]:
    """A chain whose keys say nothing of their order."""
    keys = random.Random(namespace).sample(range(1, 1 << 60), length)
    return [
        meta_of(key, nbytes, namespace=namespace, parent=keys[place - 1] if place else None, depth=place + 1)
        for place, key in enumerate(keys)
    ]


def write(tier: Tier, meta: ChunkMeta) -> None:
    """Write a chunk whose bytes follow from its name."""
    tier.write(meta, filled(meta.name, meta.nbytes))


def is_whole(tier: Tier, meta: ChunkMeta) -> bool:
    """Read what `write` wrote, or raise what the tier raises."""
    into = memory(meta.nbytes)
    tier.read(meta, into)
    return into == filled(meta.name, meta.nbytes)
