"""Tokens: who may connect where the kernel does not say who it is. The secret itself never travels."""

from __future__ import annotations

import enum
import hmac
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.protocol.greeting import Hello
from kvferry.settings import MAX_TOKEN_NAME_BYTES, is_token_name

MIN_SECRET_BYTES = 16  # whoever hears a greeting can try secrets against it
_MAX_FILE_BYTES = 1 << 20
_LABEL = b"kvferry token 1"


class Role(enum.Enum):
    """Whose proof it is, so that one side's is of no use as the other's."""

    CLIENT = b"client"
    SERVER = b"server"


@dataclass(frozen=True, slots=True)
class Token:
    """A secret that a server and its clients share, and its name, which is that of the tenant."""

    name: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not is_token_name(self.name):
            raise ValueError(f"a token's name has 1 to {MAX_TOKEN_NAME_BYTES} bytes, and no colon or space at its ends")
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ValueError(f"token {self.name!r}: its secret is shorter than {MIN_SECRET_BYTES} bytes")

    @classmethod
    def parse(cls, text: str) -> Token:
        """The token in "name:secret". Raises ValueError, which does not tell the secret."""
        name, colon, secret = text.strip().partition(":")
        if not colon:
            raise ValueError("a token is name:secret, and there is no colon")
        return cls(name, secret.encode())

    def prove(self, role: Role, hello: Hello, server_nonce: bytes, version: int = 0) -> bytes:
        """The MAC over all that a greeting has settled; `version` is the one spoken, 0 where that is still open."""
        versions = b"%d %d %d" % (hello.oldest, hello.version, version)
        parts = (_LABEL, role.value, hello.nonce, server_nonce, versions, self.name.encode())
        return hmac.digest(self.secret, b"".join(len(part).to_bytes(4, "little") + part for part in parts), "sha256")

    def accepts(self, mac: bytes, role: Role, hello: Hello, server_nonce: bytes, version: int = 0) -> bool:
        """Whether `mac` is what `prove` gives; the time that takes says nothing of where they differ."""
        return hmac.compare_digest(mac, self.prove(role, hello, server_nonce, version))


def read_tokens(path: str) -> dict[str, Token]:
    """The tokens of a file by name: a `name:secret` a line; empty lines and those with `#` in front do not count.

    Raises ValueError where the file cannot be read, is open to others than its owner, or holds something else.
    """
    text = _read_private(path)
    tokens: dict[str, Token] = {}
    for number, token in _tokens(path, text):
        if token.name in tokens:
            raise ValueError(f"{path}, line {number}: a second token named {token.name!r}")
        tokens[token.name] = token
    if not tokens:
        raise ValueError(f"the token file {path} holds no token; write name:secret on a line")
    return tokens


def _read_private(path: str) -> str:
    """A text file that is closed to others."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
                raise ValueError(f"the token file {path} must be a file that only its owner may use: chmod 600 {path}")
            data = os.read(fd, _MAX_FILE_BYTES + 1)
        finally:
            os.close(fd)
        if len(data) > _MAX_FILE_BYTES:
            raise ValueError(f"the token file {path} is longer than {_MAX_FILE_BYTES} bytes")
        return data.decode()
    except OSError as error:
        raise ValueError(f"the token file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the token file {path} is not UTF-8 text") from None


def _tokens(path: str, text: str) -> Iterator[tuple[int, Token]]:
    """The tokens with the numbers of their lines."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                yield number, Token.parse(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
