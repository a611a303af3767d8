"""Which engines there are, and which of their ranks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from kvferry.cache import Space
from kvferry.errors import RequestError
from kvferry.layout import namespace
from kvferry.protocol.messages import Register

MAX_PIECES = 1 << 18  # of one chunk: what a copier can take on without holding up others


@dataclass(frozen=True, slots=True)
class Geometry:
    """What all ranks of an engine have in common; sizes in tokens and bytes."""

    fingerprint: bytes
    chunk_tokens: int
    block_size: int
    chunk_bytes: int

    @classmethod
    def of(cls, message: Register) -> Geometry:
        """The geometry that a registration names. Raises RequestError where a chunk is no whole number of blocks."""
        layout, chunk = message.layout, message.chunk_tokens
        blocks, rest = divmod(chunk, layout.block_size)
        if rest:
            raise RequestError("geometry", f"a chunk of {chunk} tokens is no multiple of blocks of {layout.block_size}")
        pieces = blocks * len(layout.planes)
        if pieces > MAX_PIECES:
            raise RequestError(
                "geometry",
                f"a chunk of {chunk} tokens lies in {pieces} pieces ({blocks} blocks in {len(layout.planes)} planes); "
                f"at most {MAX_PIECES} are moved at once: use smaller chunks",
            )
        # The chunk's size belongs to what its bytes mean: a slot of one size is never read as one of another.
        fingerprint = hashlib.sha256(layout.fingerprint() + chunk.to_bytes(8, "little")).digest()
        return cls(fingerprint, chunk, layout.block_size, blocks * layout.block_bytes)

    def __str__(self) -> str:
        sizes = f"chunks of {self.chunk_tokens} tokens = {self.chunk_bytes} bytes, blocks of {self.block_size} tokens"
        return f"{sizes}, layout {self.fingerprint[:4].hex()}"


@dataclass(slots=True)
class Rank:
    """One rank's registration; `live` once its data path is proven."""

    cache_id: int
    space: Space
    live: bool = False


@dataclass(slots=True, eq=False)
class Engine:
    """One engine of one tenant, with the ranks that are registered now."""

    key: tuple[str, str]
    model: str
    world_size: int
    geometry: Geometry
    ranks: dict[int, Rank] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether all ranks are there."""
        return len(self.ranks) == self.world_size and all(rank.live for rank in self.ranks.values())


class EngineTable:
    """Engines by tenant and id. An engine is there while one of its ranks is."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, str], Engine] = {}

    def __len__(self) -> int:
        return len(self._engines)

    def count_of(self, tenant: str) -> int:
        """How many a tenant has."""
        return sum(owner == tenant for owner, _ in self._engines)

    def get(self, tenant: str, engine_id: str) -> Engine | None:
        """The engine, if any rank of it is registered."""
        return self._engines.get((tenant, engine_id))

    def claim(self, tenant: str, message: Register, cache_id: int) -> Engine:
        """Enter a rank, not live yet.

        Raises RequestError where the rank is taken, or does not fit the ranks that are there.
        """
        geometry = Geometry.of(message)
        if message.rank >= message.world_size:
            raise RequestError("rank", f"rank {message.rank} of world size {message.world_size}: ranks start at 0")
        key = (tenant, message.engine_id)
        engine = self._engines.get(key) or Engine(key, message.model, message.world_size, geometry)
        if message.rank in engine.ranks:
            raise RequestError(
                "rank_taken",
                f"rank {message.rank} of engine {message.engine_id!r} is registered by a process that is alive; "
                "unregister it first, or give this engine another engine_id",
            )
        for what, here, there in (
            ("model", engine.model, message.model),
            ("world size", engine.world_size, message.world_size),
            ("geometry", str(engine.geometry), str(geometry)),
        ):
            if here != there:
                raise RequestError(
                    "geometry",
                    f"rank {message.rank} of engine {message.engine_id!r} has {what} {there}, the others have {here}",
                )
        digest = namespace(
            message.model, geometry.fingerprint, rank=message.rank, world_size=message.world_size, tenant=tenant
        )
        engine.ranks[message.rank] = Rank(cache_id, Space(tenant, digest))
        self._engines[key] = engine
        return engine

    def drop(self, engine: Engine, rank: int) -> None:
        """Take a rank out; the engine goes with its last one."""
        del engine.ranks[rank]
        if not engine.ranks:
            del self._engines[engine.key]
