"""A client that sends what it likes."""

from __future__ import annotations

from kvferry.client.handshake import connect
from kvferry.client.url import parse_url
from kvferry.protocol.framing import encode_frame, reply_reader
from kvferry.protocol.messages import Message, Reply, Stats, StatsReply


class Raw:
    """A client that sends what it likes."""

    def __init__(self, url: str, *hello: Message) -> None:
        self.socket = connect(parse_url(url), 5)
        self.socket.settimeout(5)
        self._reader = reply_reader()
        try:
            for message in hello:
                self.send(message)
        except OSError:  # it was refused already
            self.socket.close()
            raise

    def send(self, message: Message) -> None:
        self.socket.sendall(encode_frame(message))

    def reply(self) -> Reply:
        while (frame := self._reader.next_frame()) is None:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._reader.feed(data)
        return frame.message

    def stats(self) -> dict[str, float]:
        """The server's counters."""
        self.send(Stats(1))
        reply = self.reply()
        assert isinstance(reply, StatsReply)
        return reply.values

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
