"""Whatever a stranger sends, in whatever order: it is welcome after a right greeting, and never otherwise."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol.auth import Role, Token
from kvferry.protocol.framing import encode_frame
from kvferry.protocol.messages import Challenge, Error, Hello, Message, Ping, Pong, Prove, Reply, Stats, Welcome
from serving.raw import Raw
from serving.tokens import TOKENS, TokenServer, hello_of, token_server

A = TOKENS["a"]
WRONG = Token("a", b"not the secret.." * 2)

# What a stranger may try next. "prove" answers the last challenge; where there was none it is any 32 bytes.
STEPS = ("hello", "hello without token", "prove", "prove wrongly", "prove as server", "ping", "stats", "garbage")


@pytest.fixture(scope="module")
def served() -> Iterator[TokenServer]:
    with tempfile.TemporaryDirectory() as folder, token_server(Path(folder)) as made:
        yield made


class Stranger:
    """One connection over TCP."""

    def __init__(self, url: str) -> None:
        self.raw = Raw(url)
        self.nonce = b"?" * 32
        self.welcome = self.ended = False

    def take(self, step: str) -> Reply | None:
        """Send what the step says; the answer, None where the connection is over."""
        try:
            if step == "garbage":
                self.raw.socket.sendall(b"\x05\0\0\0abcde")
            else:
                self.raw.send(self.message(step))
            reply = self.raw.reply()
        except (EOFError, ConnectionError):
            self.ended = True
            return None
        if isinstance(reply, Challenge):
            self.nonce = reply.nonce
        self.welcome |= isinstance(reply, Welcome)
        return reply

    def message(self, step: str) -> Message:
        proofs = {
            "prove": A.prove(Role.CLIENT, hello_of(A), self.nonce),
            "prove wrongly": WRONG.prove(Role.CLIENT, hello_of(A), self.nonce),
            "prove as server": A.prove(Role.SERVER, hello_of(A), self.nonce, 2),
        }
        if step in proofs:
            return Prove(proofs[step])
        return {"hello": hello_of(A), "hello without token": Hello(2, 1), "ping": Ping(7), "stats": Stats(8)}[step]


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=5), prefix=st.sampled_from([[], ["hello"], ["hello", "prove"]]))
def test_any_order_of_frames(served: TokenServer, steps: Sequence[str], prefix: Sequence[str]) -> None:
    stranger = Stranger(served.tcp)
    done: list[str] = []
    with contextlib.closing(stranger.raw):
        for step in (*prefix, *steps):
            reply = stranger.take(step)
            done.append(step)
            assert stranger.welcome == (done[:2] == ["hello", "prove"])
            if stranger.welcome and step == "ping":
                assert reply == Pong(7)
            elif done not in (["hello"], ["hello", "prove"]) and not (stranger.welcome and step == "stats"):
                assert reply is None or isinstance(reply, Error)
                return


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 200), value=st.integers(1, 255), which=st.sampled_from(["hello", "prove"]))
def test_a_changed_byte_is_never_a_proof(served: TokenServer, place: int, value: int, which: str) -> None:
    """Any byte counts but those of what a client calls itself, the field `client`."""
    stranger = Stranger(served.tcp)
    with contextlib.closing(stranger.raw):
        if which == "prove":
            stranger.take("hello")
        frame = bytearray(encode_frame(stranger.message(which)))
        place = 4 + place % (len(frame) - 4)
        frame[place] ^= value
        client = encode_frame(hello_of(A)).find(b"client")
        if which == "hello" and client - 1 <= place < client + len(b"client\xa4test"):
            return
        stranger.raw.socket.sendall(frame)
        with contextlib.suppress(EOFError, ConnectionError):
            reply = stranger.raw.reply()
            if isinstance(reply, Challenge):
                stranger.nonce = reply.nonce
                stranger.take("prove")
            stranger.welcome |= isinstance(reply, Welcome)
    assert not stranger.welcome
