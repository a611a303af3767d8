"""A client that sends what it likes."""

from __future__ import annotations

import socket

from kvferry.protocol.framing import encode_frame, reply_reader
from kvferry.protocol.messages import Message, Reply


class Raw:
    """A client that sends what it likes."""

    def __init__(self, path: str, *hello: Message) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(5)
        self.socket.connect(path)
        self._reader = reply_reader()
        for message in hello:
            self.send(message)

    def send(self, message: Message) -> None:
        self.socket.sendall(encode_frame(message))

    def reply(self) -> Reply:
        while (frame := self._reader.next_frame()) is None:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._reader.feed(data)
        return frame.message

    def until_end(self) -> list[Reply]:
        """All that comes until the server hangs up."""
        found: list[Reply] = []
        try:
            while True:
                found.append(self.reply())
        except (EOFError, ConnectionResetError):
            return found

    def close(self) -> None:
        self.socket.close()
