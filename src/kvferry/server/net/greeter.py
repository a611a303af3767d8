"""The first frames of a session: which protocol is spoken, and who it is where the kernel cannot say that."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from kvferry.errors import ProtocolError, RequestError
from kvferry.protocol.auth import MIN_SECRET_BYTES, Role, Token
from kvferry.protocol.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    TOKEN_NONCE_BYTES,
    Challenge,
    Hello,
    Prove,
    Request,
    Welcome,
)
from kvferry.server.session import Session


class Greeter:
    """Welcomes sessions, or raises RequestError, which ends them. Never waits: what is pending is the session's.

    Parameters
    ----------
    tokens
        By name. Each is a tenant of its own, over TCP and on the Unix socket.
    heartbeat_s
        What peers over TCP are told; see Welcome.
    on_proven
        Called when a session has shown its token, with the tenant that it is by that, before it is welcomed; raises
        RequestError where there is no room.
    on_welcome
        Called when the greeting is over.
    """

    def __init__(
        self,
        tokens: Mapping[str, Token],
        *,
        incarnation: bytes,
        heartbeat_s: float,
        on_proven: Callable[[Session, str], None],
        on_welcome: Callable[[Session], None],
    ) -> None:
        self._tokens = tokens
        self._incarnation = incarnation
        self._heartbeat_s = heartbeat_s
        self._on_proven = on_proven
        self._on_welcome = on_welcome
        self._nobody = Token("nobody", secrets.token_bytes(MIN_SECRET_BYTES))

    def take(self, session: Session, message: Request) -> None:
        """A frame of a session that is not welcome yet."""
        if isinstance(message, Hello) and session.greeting.hello is None:
            self._hello(session, message)
        elif isinstance(message, Prove) and session.greeting.token is not None:
            self._prove(session, message)
        else:
            raise ProtocolError(f"{type(message).__name__} came in the greeting: the first frame must be Hello")

    def _hello(self, session: Session, hello: Hello) -> None:
        if hello.oldest > PROTOCOL_VERSION or hello.version < OLDEST_VERSION or hello.oldest > hello.version:
            raise RequestError(
                "version",
                f"the client speaks protocol {hello.oldest} to {hello.version}, "
                f"this server {OLDEST_VERSION} to {PROTOCOL_VERSION}; update the older one",
            )
        greeting = session.greeting
        greeting.hello = hello
        if hello.token_name:
            self._challenge(session, hello)
        elif greeting.remote:
            raise RequestError(
                "token", "over TCP this server asks for a token: give the client one (name:secret) of its token file"
            )
        else:
            self._welcome(session, hello)

    def _challenge(self, session: Session, hello: Hello) -> None:
        """Ask for the proof, also where there is no such token: who does not have it learns no names."""
        if len(hello.nonce) != TOKEN_NONCE_BYTES:
            raise ProtocolError(
                f"a Hello with a token has a nonce of {TOKEN_NONCE_BYTES} bytes, not {len(hello.nonce)}"
            )
        if not self._tokens:
            raise RequestError("token", "this server was started without a token file, and takes none")
        session.greeting.token = self._tokens.get(hello.token_name, self._nobody)
        session.greeting.nonce = secrets.token_bytes(TOKEN_NONCE_BYTES)
        session.send(Challenge(session.greeting.nonce))

    def _prove(self, session: Session, message: Prove) -> None:
        greeting = session.greeting
        token, hello = greeting.token, greeting.hello
        assert token is not None
        assert hello is not None
        if not token.accepts(message.mac, Role.CLIENT, hello, greeting.nonce) or token is self._nobody:
            raise RequestError(
                "token", f"this server has no token {hello.token_name[:64]!r} with that secret; compare the token files"
            )
        tenant = f"token:{token.name}"
        self._on_proven(session, tenant)
        session.tenant = tenant
        self._welcome(session, hello)

    def _welcome(self, session: Session, hello: Hello) -> None:
        greeting = session.greeting
        greeting.version = min(hello.version, PROTOCOL_VERSION)
        token, mac = greeting.token, b""
        if token is not None:
            mac = token.prove(Role.SERVER, hello, greeting.nonce, greeting.version)
        heartbeat_s = self._heartbeat_s if greeting.remote else 0.0
        session.connection.lift_limit()
        session.send(Welcome(greeting.version, self._incarnation, mac, heartbeat_s))
        self._on_welcome(session)
