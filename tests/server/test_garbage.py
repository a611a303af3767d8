"""The collector does not walk all of a large server again and again, and nothing that ends needs it."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

from kvferry.cache import BytePool, ChunkIndex, Space
from kvferry.cache.chunk import Chunk
from kvferry.protocol.messages import Hello, Ping, Pong, Welcome
from kvferry.server import CacheServer, ServerConfig
from kvferry.server.net.connection import Connection
from kvferry.server.session import Session
from serving.process import eventually
from serving.raw import Raw

_COLLECTOR = """
import gc
from kvferry.server.garbage import Garbage

class Node:
    def __init__(self):
        self.itself = self

before = len(gc.callbacks)
with Garbage():
    kept = [[Node()] for _ in range(50_000)]
    gc.collect()
    after_first = len(gc.get_objects())
    kept += [[Node()] for _ in range(10)]
    assert gc.collect() == 0
    lost = Node()
    del lost
    assert gc.collect() > 0  # what is new is still looked at
    gc.collect(1)
print(after_first, len(gc.callbacks) - before)
"""


def test_what_has_survived_is_not_walked_again() -> None:
    output = subprocess.run([sys.executable, "-c", _COLLECTOR], capture_output=True, text=True, check=True).stdout
    left, callbacks = map(int, output.split())
    assert left < 1000
    assert callbacks == 0


def test_a_session_that_has_ended_needs_no_collector(tmp_path: Path) -> None:
    """Else each that a collection has seen alive would stay for ever."""
    config = ServerConfig(socket_path=str(tmp_path / "s"), memory_bytes=1 << 20, device="cpu")
    with CacheServer(config) as server:
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                raw = Raw(config.socket_path, Hello(2, 1))
                assert isinstance(raw.reply(), Welcome)
                raw.send(Ping(1))
                assert raw.reply() == Pong(1)
                raw.close()
            eventually(lambda: len(server._parts.sessions) == 0)
            eventually(lambda: count(Session) + count(Connection) <= 2)  # the loop may still hold the last one
        finally:
            gc.enable()


def test_a_chunk_that_has_gone_needs_no_collector() -> None:
    index = ChunkIndex(BytePool(1 << 20))
    space = Space("t", b"s" * 32)
    gc.collect()
    gc.disable()
    try:
        before = count(Chunk)
        for number in range(4):
            keys = [bytes([number, place]) * 16 for place in range(100)]
            index.commit(index.reserve(space, keys, 1).chunks)
        root = index.find(space, keys[0])
        assert root is not None
        index.discard(root)
        del root
        while index.sweep(1.0) or index.evict_one():
            pass
        assert count(Chunk) - before <= 100  # entries of queues that are out of date
        index.forget_space(space)
        del index
        assert count(Chunk) == before
    finally:
        gc.enable()


def count(kind: type) -> int:
    """How many there are."""
    return sum(type(each) is kind for each in gc.get_objects())
