"""What a server is to know of a client: the KV cache that it gives, or the engine that it looks up for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.client.link import Link
from kvferry.client.registration import RankName, Registration, register, register_again, unregister
from kvferry.errors import ServerGoneError
from kvferry.layout import KVLayout
from kvferry.protocol.messages import Attach, Attached

if TYPE_CHECKING:
    import torch


class Presence:
    """Read by any thread; changed by whoever is exclusive on the connection, but for the chunk size.

    Lookups of any thread learn that, too. What this holds outlives a link, and is told to each new one.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # guards the engine and its chunk size, which belong together
        self.registration: Registration | None = None
        self.engine_id: str | None = None
        self.chunk_tokens = 0  # 0 until they are known

    def introduce(self, link: Link) -> None:
        """Tell a new link's server; it may have known us before, or not."""
        registration, engine_id = self.registration, self.engine_id
        if registration is not None:
            register_again(link, registration, self._timeout_s)
        elif engine_id is not None:
            self.attach(link, engine_id)

    def has(self, name: RankName, layout: KVLayout, flats: Sequence[torch.Tensor]) -> bool:
        """Whether this very cache is registered already. Raises ValueError where another is."""
        known = self.registration
        if known is None:
            return False
        if known.name != name or not known.storages.covers(layout, flats):
            raise ValueError("this client has other KV caches registered; unregister() first, or use another client")
        return True

    def register(self, link: Link | None, registration: Registration) -> None:
        """Give a cache, which is kept here. Where there is no server, or it goes, a later `introduce` does it."""
        if link is not None:
            with contextlib.suppress(ServerGoneError):
                register(link, registration, self._timeout_s)
        self.registration = registration
        self._set_engine(registration.name.engine_id, registration.name.chunk_tokens)

    def unregister(self, link: Link | None) -> None:
        """Have the server unmap the cache, where there are both. It is not forgotten here."""
        if link is None or self.registration is None:
            return
        try:
            unregister(link, self._timeout_s)
        except ServerGoneError:
            link.close(0.0)  # not usable from here on, whether its reader knows it yet or not

    def forget(self) -> None:
        """There is no cache any more, and no engine."""
        self.registration = None
        self._set_engine(None, 0)

    def attach_later(self, engine_id: str) -> None:
        """Look up for an engine once there is a server; a rank stays with its own engine."""
        if self.registration is None:
            self._set_engine(engine_id, 0)

    def attach(self, link: Link, engine_id: str) -> bool:
        """Look up for an engine from here on; whether all its ranks are there."""
        attached = self._attach(link, engine_id)
        self._set_engine(engine_id, attached.chunk_tokens)
        return attached.ready

    def known_chunk_tokens(self, link: Link) -> int:
        """The chunk size; the server is asked again while it is not known, and 0 if its engine is not all there."""
        with self._lock:
            engine_id, chunk_tokens = self.engine_id, self.chunk_tokens
        if engine_id is None or chunk_tokens > 0:
            return chunk_tokens
        attached = self._attach(link, engine_id)
        self.learn(engine_id, attached.chunk_tokens)
        return attached.chunk_tokens if attached.ready else 0

    def learn(self, engine_id: str | None, chunk_tokens: int) -> None:
        """A server has told the chunk size of an engine, which may be ours no more."""
        with self._lock:
            if engine_id is not None and self.engine_id == engine_id:
                self.chunk_tokens = chunk_tokens

    def _attach(self, link: Link, engine_id: str) -> Attached:
        return link.call(lambda seq: Attach(seq, engine_id), Attached, self._timeout_s)

    def _set_engine(self, engine_id: str | None, chunk_tokens: int) -> None:
        with self._lock:
            self.engine_id, self.chunk_tokens = engine_id, chunk_tokens
