"""What a lower tier is: a store of whole chunks by name, called by the server's tier threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class ChunkName(NamedTuple):
    """A chunk's identity, the same in every process and on every host: 32 bytes of namespace, 32 of chain key."""

    namespace: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class ChunkMeta:
    """What is kept beside a chunk's bytes, and checked when they are read.

    `parent` is the key of the chunk before it in its chain, empty for the first; `depth` counts from 1. `tenant` owns
    the namespace.
    """

    name: ChunkName
    parent: bytes
    depth: int
    nbytes: int
    tenant: str


class Tier(Protocol):
    """Keeps chunks somewhere slower than host memory.

    Every call blocks, for a bounded time, and may come from any of the `num_threads` threads that serve the tier. A
    failed call leaves nothing behind under the chunk's name that `read` would return.
    """

    name: str
    num_threads: int

    def write(self, meta: ChunkMeta, data: memoryview, digest: bytes = b"") -> None:
        """Keep `data`, `meta.nbytes` bytes, whole or not at all; replaces what is there.

        Where its checksum is known already, `digest` is kept with it, so that `read` finds damage done before.

        Raises TierFullError, TierUnavailableError, or TierError.
        """

    def read(self, meta: ChunkMeta, into: memoryview) -> bytes:
        """Fill `into` with the chunk's bytes, and return their checksum; that and `meta` are checked against its own.

        Raises ChunkMissingError, ChunkCorruptError or TierUnavailableError; `into` then holds nothing of use.
        """

    def find(self, names: Sequence[ChunkName]) -> int:
        """How many of `names`, from the first on, are there.

        May be too many where somebody deletes from the middle of a chain; `read` then misses the chunk. Raises
        TierUnavailableError.
        """

    def delete(self, names: Sequence[ChunkName]) -> None:
        """Forget chunks; those that are not there are no error. Raises TierUnavailableError."""

    def close(self) -> None:
        """Give back what is held; idempotent, and called once no other call is running."""
