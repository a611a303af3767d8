"""An engine that speaks protocol 1 only: `python -m protocol.v1_client SOCKET`; prints as JSON what it got."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import torch

from kvferry.ipc import allocate_shared
from kvferry.ipc.events import encode_events, make_event_ring
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.wire import encode_descriptors
from protocol import v1_messages as v1

BLOCKS, BLOCK_BYTES, CHUNK_BLOCKS, BLOCK_SIZE = 16, 4096, 4, 16
LAYOUT = v1.KVLayout(
    format="v1", block_size=BLOCK_SIZE, num_blocks=BLOCKS, dtype="uint8", num_layers=1, num_kv_heads=1, head_dim=256,
    planes=(v1.Plane(0, 0, BLOCK_BYTES, BLOCK_BYTES),),
)  # fmt: skip


class Client:
    """One connection, one request at a time."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(path)

    def ask(self, message: v1.Message, fds: tuple[int, ...] = ()) -> Any:
        socket.send_fds(self.socket, [v1.frame(message)], fds)
        reply, _ = v1.read(self.socket, v1.Reply)
        return reply


def register(client: Client, cache: torch.Tensor) -> tuple[bytes, v1.Ticket]:
    """What the server read through its mapping, and an event that has happened."""
    wrapper = HostIPCWrapper(cache)
    ring = make_event_ring(None, False)
    events, event_fds = encode_events(ring)
    ack = client.ask(
        v1.Register(1, "old", "m", 0, 1, CHUNK_BLOCKS * BLOCK_SIZE, "", LAYOUT, encode_descriptors([wrapper]),
                    1, events, len(event_fds))
    )  # fmt: skip
    assert ack == v1.FdAck(1, 0), ack
    fd = wrapper.export_fd(0)
    assert client.ask(v1.FdBatch(1, 1), (fd,)) == v1.FdAck(1, 1)
    assert client.ask(v1.FdBatch(1, len(event_fds)), tuple(event_fds)) == v1.FdAck(1, 1 + len(event_fds))
    for each in (fd, *event_fds):
        os.close(each)
    proof, _ = v1.read(client.socket, v1.Reply)
    assert client.ask(v1.Confirm(1)) == v1.Registered(1)
    ticket = ring.record()
    return proof.nonces[0], v1.Ticket(ticket.slot, ticket.value)


def main() -> None:
    client = Client(sys.argv[1])
    welcome = client.ask(v1.Hello(1, 1, "old"))
    cache = allocate_shared((BLOCKS * BLOCK_BYTES,), torch.uint8)
    cache.random_(0, 255)
    nonce, ticket = register(client, cache)
    blocks = cache.view(BLOCKS, BLOCK_BYTES)
    keys = os.urandom(2 * v1.KEY_BYTES)
    deadline = time.monotonic() + 20
    while client.ask(v1.Stats(2)).values["memory_bytes"] == 0 and time.monotonic() < deadline:
        pass
    attached = client.ask(v1.Attach(3, "old"))
    ids = b"".join(block.to_bytes(4, "little") for block in range(16))
    stored = client.ask(v1.Store(4, keys, 0, ids[: 8 * 4], ticket))
    found = client.ask(v1.Lookup(5, "r", keys))
    retrieved = client.ask(v1.Retrieve(6, found.lease_id, ids[8 * 4 :]))
    said = {
        "version": welcome.version,
        "mapped": nonce == bytes(cache[: v1.NONCE_BYTES].tolist()),
        "ready": attached.ready,
        "stored": stored.num_stored,
        "tokens": found.tokens,
        "retrieved": retrieved.num_chunks,
        "equal": torch.equal(blocks[:8], blocks[8:]),
        "pong": client.ask(v1.Ping(7)) == v1.Pong(7),
        "unregistered": client.ask(v1.Unregister(8)) == v1.Unregistered(8),
    }
    print(json.dumps(said))
    os._exit(0)  # as an engine does that is killed: the ring and the wrapper are not closed


if __name__ == "__main__":
    main()
