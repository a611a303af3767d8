"""A small cache server of protocol 1: `python -m protocol.v1_server SOCKET`. One client after the other."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Any

import torch

from kvferry.ipc.wire import decode_descriptors, fd_slots
from protocol import v1_messages as v1


class Server:
    """What is stored outlives the connections; all else is one connection's."""

    def __init__(self, sock: socket.socket, chunks: dict[bytes, bytes]) -> None:
        self.socket = sock
        self.chunks = chunks
        self.leases: dict[int, list[bytes]] = {}
        self.register: v1.Register | None = None
        self.fds: list[int] = []
        self.memory: list[torch.Tensor] = []
        self.wrappers: list[Any] = []
        self.handlers: dict[type, Any] = {
            v1.Hello: self.hello,
            v1.Register: self.begin,
            v1.FdBatch: self.take_fds,
            v1.Confirm: self.confirm,
            v1.Unregister: self.unregister,
            v1.Attach: self.attach,
            v1.Lookup: self.lookup,
            v1.Release: self.release,
            v1.Store: self.store,
            v1.Retrieve: self.retrieve,
            v1.Stats: self.stats,
            v1.Ping: self.ping,
        }

    def serve(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                message, fds = v1.read(self.socket, v1.Request)
                self.fds += fds
                reply = self.handlers[type(message)](message)
                for each in reply if isinstance(reply, list) else [reply]:
                    if each is not None:
                        self.socket.sendall(v1.frame(each))

    def hello(self, message: v1.Hello) -> v1.Message:
        assert message.oldest <= v1.VERSION <= message.version
        return v1.Welcome(v1.VERSION, b"i" * 16)

    def begin(self, message: v1.Register) -> v1.Message:
        self.register = message
        return v1.FdAck(message.seq, 0)

    def take_fds(self, message: v1.FdBatch) -> list[v1.Message]:
        assert self.register is not None
        ack: list[v1.Message] = [v1.FdAck(message.seq, len(self.fds))]
        if len(self.fds) < self.register.num_fds + self.register.num_event_fds:
            return ack
        self.wrappers = decode_descriptors(self.register.wrappers)
        for (wrapper, index), fd in zip(fd_slots(self.wrappers), self.fds, strict=False):
            wrapper.import_fd(index, fd)
        for fd in self.fds[self.register.num_fds :]:
            os.close(fd)
        self.memory = [wrapper.to_tensor() for wrapper in self.wrappers]
        nonces = tuple(memory[: v1.NONCE_BYTES].numpy().tobytes() for memory in self.memory)
        return [*ack, v1.Proof(message.seq, nonces)]

    def confirm(self, message: v1.Confirm) -> v1.Message:
        return v1.Registered(message.seq)

    def unregister(self, message: v1.Unregister) -> v1.Message:
        self.memory.clear()
        for wrapper in self.wrappers:
            wrapper.close()
        return v1.Unregistered(message.seq)

    def attach(self, message: v1.Attach) -> v1.Message:
        return v1.Attached(message.seq, False)

    def lookup(self, message: v1.Lookup) -> v1.Message:
        assert self.register is not None
        found = []
        for key in _keys(message.keys):
            if key not in self.chunks:
                break
            found.append(key)
        self.leases[message.seq] = found
        chunk_tokens = self.register.chunk_tokens
        return v1.Found(message.seq, len(found) * chunk_tokens, message.seq if found else 0, chunk_tokens)

    def release(self, message: v1.Release) -> None:
        self.leases.pop(message.lease_id, None)

    def store(self, message: v1.Store) -> v1.Message:
        keys = _keys(message.keys)
        for number, key in list(enumerate(keys))[message.start_chunk :]:
            self.chunks[key] = b"".join(bytes(run.numpy()) for run in self._runs(message.block_ids, number))
        return v1.Stored(message.seq, len(keys) - message.start_chunk, 0, 0)

    def retrieve(self, message: v1.Retrieve) -> v1.Message:
        keys = self.leases.pop(message.lease_id)
        for number, key in enumerate(keys):
            rest = self.chunks[key]
            for run in self._runs(message.block_ids, number):
                run.copy_(torch.frombuffer(bytearray(rest[: len(run)]), dtype=torch.uint8))
                rest = rest[len(run) :]
        return v1.Retrieved(message.seq, len(keys))

    def stats(self, message: v1.Stats) -> v1.Message:
        return v1.StatsReply(message.seq, {"memory_bytes": 1.0})

    def ping(self, message: v1.Ping) -> v1.Message:
        return v1.Pong(message.seq)

    def _runs(self, block_ids: bytes, chunk: int) -> list[torch.Tensor]:
        """The byte runs of one chunk's blocks."""
        assert self.register is not None
        layout = self.register.layout
        size = self.register.chunk_tokens // layout.block_size
        ids = [int.from_bytes(block_ids[at : at + 4], "little") for at in range(0, len(block_ids), 4)]
        return [
            self.memory[plane.storage][start : start + plane.length]
            for block in ids[chunk * size : (chunk + 1) * size]
            for plane in layout.planes
            for start in [plane.offset + block * plane.stride]
        ]


def _keys(data: bytes) -> list[bytes]:
    return [data[at : at + v1.KEY_BYTES] for at in range(0, len(data), v1.KEY_BYTES)]


def main() -> None:
    chunks: dict[bytes, bytes] = {}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen()
        print("ready", flush=True)
        while True:
            sock, _ = listening.accept()
            with sock:
                Server(sock, chunks).serve()


if __name__ == "__main__":
    main()
