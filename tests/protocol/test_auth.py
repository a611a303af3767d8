"""Tokens: what is proven, and the file in which they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.protocol.auth import Role, Token, read_tokens
from kvferry.protocol.messages import Hello

SECRET = "0123456789abcdef"
TOKEN = Token("team-a", SECRET.encode())
HELLO = Hello(2, 1, "pid 1", "team-a", b"c" * 32)
NONCE = b"s" * 32


def test_the_proof_is_what_it_always_was() -> None:
    assert TOKEN.prove(Role.CLIENT, HELLO, NONCE).hex() == GOLDEN[0]
    assert TOKEN.prove(Role.SERVER, HELLO, NONCE, 2).hex() == GOLDEN[1]


# Computed once; another implementation of the protocol has to come to the same.
GOLDEN = (
    "4018903ec97ada4b08ab2eb1a4d93c985e3aea4ccc17b2a09d41da215c1ddb37",
    "1ed8b09cd5bceb4e05042b93097b5b73870d7efa6caaa6d3bd5ca9d5bab5300f",
)


@pytest.mark.parametrize(
    ("token", "role", "hello", "nonce", "version"),
    [
        (Token("team-a", b"0123456789abcdeF"), Role.CLIENT, HELLO, NONCE, 0),
        (Token("team-b", SECRET.encode()), Role.CLIENT, HELLO, NONCE, 0),
        (TOKEN, Role.SERVER, HELLO, NONCE, 0),
        (TOKEN, Role.CLIENT, Hello(2, 1, "pid 1", "team-a", b"d" * 32), NONCE, 0),
        (TOKEN, Role.CLIENT, Hello(2, 2, "pid 1", "team-a", b"c" * 32), NONCE, 0),
        (TOKEN, Role.CLIENT, Hello(3, 1, "pid 1", "team-a", b"c" * 32), NONCE, 0),
        (TOKEN, Role.CLIENT, HELLO, b"t" * 32, 0),
        (TOKEN, Role.CLIENT, HELLO, NONCE, 1),
        # The two nonces, the other way round:
        (TOKEN, Role.CLIENT, Hello(2, 1, "pid 1", "team-a", NONCE), b"c" * 32, 0),
    ],
)
def test_a_proof_is_of_one_token_role_greeting_and_version(
    token: Token, role: Role, hello: Hello, nonce: bytes, version: int
) -> None:
    mac = TOKEN.prove(Role.CLIENT, HELLO, NONCE)
    assert TOKEN.accepts(mac, Role.CLIENT, HELLO, NONCE)
    assert not token.accepts(mac, role, hello, nonce, version)
    assert not TOKEN.accepts(b"", Role.CLIENT, HELLO, NONCE)


def test_a_token_does_not_show_its_secret() -> None:
    assert SECRET not in repr(TOKEN)
    for text in ("name:sesame", "sesame without a colon", f":{SECRET}", f" :{SECRET}", f"{'n' * 513}:{SECRET}"):
        with pytest.raises(ValueError, match="token") as caught:
            Token.parse(text)
        assert "sesame" not in str(caught.value)
        assert SECRET not in str(caught.value)
    assert Token.parse(f"team-a:{SECRET}\n") == TOKEN
    assert Token.parse(f"a:{SECRET}:more").secret == f"{SECRET}:more".encode()


def file_of(folder: Path, text: str | bytes, mode: int = 0o600) -> str:
    path = folder / "tokens"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return str(path)


def test_a_file_of_tokens(tmp_path: Path) -> None:
    path = file_of(tmp_path, f"# who\n\n team-a:{SECRET}\nteam-b:{SECRET[::-1]}\n  # not:{SECRET}\n")
    tokens = read_tokens(path)
    assert tokens == {"team-a": TOKEN, "team-b": Token("team-b", SECRET[::-1].encode())}


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (f"team-a:{SECRET}", 0o640, "chmod 600"),
        (f"team-a:{SECRET}", 0o604, "chmod 600"),
        (f"team-a:{SECRET}\nteam-a:{SECRET}", 0o600, "line 2: a second token named 'team-a'"),
        (f"team-a:{SECRET}\n{SECRET}", 0o600, "line 2: a token is name:secret"),
        ("team-a:short", 0o600, "line 1: token 'team-a'"),
        ("# nothing\n", 0o600, "holds no token"),
        (b"\xff\xfe" * 20, 0o600, "UTF-8"),
        ("#" * ((1 << 20) + 1), 0o600, "longer than"),
    ],
)
def test_a_file_that_is_not_right_is_named_without_its_secrets(
    tmp_path: Path, text: str | bytes, mode: int, words: str
) -> None:
    path = file_of(tmp_path, text, mode)
    with pytest.raises(ValueError, match=words) as caught:
        read_tokens(path)
    assert path in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none cannot be read: No such file"):
        read_tokens(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="a file that only its owner"):
        read_tokens(str(tmp_path))
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo, 0o600)
    with pytest.raises(ValueError, match="a file that only its owner"):  # and does not wait for a writer
        read_tokens(fifo)
