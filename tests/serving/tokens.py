"""Servers that ask for a token, in this process, with a clock that tests set; and greetings step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry.protocol.auth import Role, Token
from kvferry.protocol.messages import PROTOCOL_VERSION, Challenge, Hello, Prove, Welcome
from kvferry.server import CacheServer, ServerConfig
from serving.raw import Raw

TOKENS = {name: Token(name, name.encode() * 16) for name in ("a", "b", "operator")}
NONCE = b"n" * 32


def token_file(folder: Path) -> str:
    path = folder / "tokens"
    path.write_text("".join(f"{token.name}:{token.secret.decode()}\n" for token in TOKENS.values()))
    path.chmod(0o600)
    return str(path)


def text_of(token: Token) -> str:
    """As a client is given it."""
    return f"{token.name}:{token.secret.decode()}"


class TokenServer:
    """A server at a Unix socket and at TCP. `ahead_s` is how far its clock goes before everybody else's."""

    def __init__(self, folder: Path, listen: str = "tcp://127.0.0.1:0", **config: Any) -> None:
        self.path = str(folder / "s")
        self.ahead_s = 0.0
        self.server = CacheServer(
            ServerConfig(
                socket_path=self.path, listen=listen, token_file=token_file(folder), memory_bytes=1 << 20, device="cpu",
                **config,
            )
        )  # fmt: skip
        on_tick = self.server._loop._on_tick
        self.server._loop._on_tick = lambda now: min(on_tick(now + self.ahead_s), 0.01)
        self.server.start()
        _, self.tcp = self.server.urls

    def stats(self) -> dict[str, float]:
        """Its counters, over a connection of their own."""
        raw = Raw(self.path, Hello(1, 1))
        try:
            raw.reply()
            return raw.stats()
        finally:
            raw.close()


@contextlib.contextmanager
def token_server(folder: Path, **arguments: Any) -> Iterator[TokenServer]:
    made = TokenServer(folder, **arguments)
    try:
        yield made
    finally:
        made.server.stop()


def hello_of(token: Token, nonce: bytes = NONCE) -> Hello:
    return Hello(PROTOCOL_VERSION, 1, "test", token.name, nonce)


def challenged(url: str, token: Token, nonce: bytes = NONCE) -> tuple[Raw, bytes]:
    """A connection that has named a token, and the server's nonce."""
    raw = Raw(url, hello_of(token, nonce))
    reply = raw.reply()
    assert isinstance(reply, Challenge)
    return raw, reply.nonce


def welcomed(url: str, token: Token) -> Raw:
    """A connection that has shown a token."""
    raw, nonce = challenged(url, token)
    raw.send(Prove(token.prove(Role.CLIENT, hello_of(token), nonce)))
    welcome = raw.reply()
    assert isinstance(welcome, Welcome)
    assert token.accepts(welcome.mac, Role.SERVER, hello_of(token), nonce, welcome.version)
    return raw
