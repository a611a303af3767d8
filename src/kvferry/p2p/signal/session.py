"""One session: what is known of the peer, and how far the handshake has come."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import zmq

from kvferry.p2p.geometry import Piece, common_pieces, shared_heads
from kvferry.p2p.signal.handshake import Acceptor, Initiator
from kvferry.p2p.signal.messages import NOBODY, About


class State(enum.Enum):
    """How far it has come."""

    GREETING = "greeting"
    LINKING = "linking"
    UP = "up"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Session:
    """A pair of sockets, ours and the peer's. `address` is where we opened it to, None where the peer opened it."""

    socket: zmq.Socket[bytes]
    identity: bytes | None
    address: str | None
    handshake: Initiator | Acceptor
    own: About
    heard_at: float
    state: State = State.GREETING
    peer: bytes = NOBODY
    about: About | None = None
    carrier: str = ""
    why: str = ""  # what kept it from having a better one
    set_up_by: float = 0.0
    said_at: float = 0.0
    _pieces: dict[tuple[bool, int, int], tuple[Piece, ...]] = field(default_factory=dict)
    _layer_bytes: tuple[int, ...] | None = None

    @property
    def ended(self) -> bool:
        return self.state is State.ENDED

    @property
    def is_up(self) -> bool:
        return self.state is State.UP

    @property
    def uses_gpu(self) -> bool:
        """Whether an engine of the two, or both, has a GPU."""
        return bool(self.own.device_uuid or (self.about is not None and self.about.device_uuid))

    @property
    def moves_blocks(self) -> bool:
        """Whether both sides had registered KV caches when it was made; they fit then."""
        about = self.about
        return about is not None and about.geometry is not None and self.own.geometry is not None

    def pieces(self, layer: int) -> tuple[Piece, ...]:
        """The pieces of one layer's blocks on our side; only where it `moves_blocks`."""
        assert self.about is not None
        return self._common(self.own, self.about, layer)

    def peer_pieces(self, layer: int) -> tuple[Piece, ...]:
        """The same on the peer's side: as many, of the same lengths."""
        assert self.about is not None
        return self._common(self.about, self.own, layer)

    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each layer that go over the session; only where it `moves_blocks`."""
        if self._layer_bytes is None:
            assert self.own.geometry is not None
            layers = range(len(self.own.geometry.layers))
            self._layer_bytes = tuple(sum(piece.length for piece in self.pieces(layer)) for layer in layers)
        return self._layer_bytes

    def part_of_mine(self) -> int:
        """Which of the ranks of this side that have to do with the peer's rank this one is."""
        assert self.about is not None
        return self.own.tp_rank % max(1, self.own.tp_size // self.about.tp_size)

    def _common(self, one: About, other: About, layer: int) -> tuple[Piece, ...]:
        """The pieces on the side of `one`, worked out once for all layers of its kind."""
        assert one.geometry is not None
        assert other.geometry is not None
        kinds = one.geometry.layers[layer], other.geometry.layers[layer]
        key = (one is self.own, *kinds)
        if key not in self._pieces:
            mine, theirs = one.geometry.kinds[kinds[0]], other.geometry.kinds[kinds[1]]
            self._pieces[key] = common_pieces(mine, theirs, shared_heads(one, other))
        return self._pieces[key]

    @property
    def where(self) -> str:
        """The peer's address, for people: the one that it was reached at, else what it says of itself, "" before."""
        return self.address or (self.about.address if self.about else "")

    def __repr__(self) -> str:
        where = self.where or "an unknown engine"
        return f"<session {'to' if self.address else 'from'} {where}, {self.state.value}>"
