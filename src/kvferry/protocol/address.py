"""Where a cache server is: a Unix socket's path, or a TCP host and port."""

from __future__ import annotations

from dataclasses import dataclass

TCP_SCHEME = "tcp://"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """The path of a Unix socket."""

    path: str

    def __str__(self) -> str:
        return f"unix://{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host, by name or number (IPv6 without brackets), and a port; 0 lets the system choose one to listen at."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{TCP_SCHEME}{host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> TcpAddress:
        """The address in "tcp://host:port", "tcp://[::1]:port" or "tcp://:port", which is on loopback.

        Raises ValueError for anything else.
        """
        host, colon, port = url.removeprefix(TCP_SCHEME).rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        brackets = bare is not host
        numeric = port.isascii() and port.isdigit() and len(port) <= 5
        if not url.startswith(TCP_SCHEME) or not colon or not numeric or int(port) > 0xFFFF:
            raise ValueError(f"{url!r} is no TCP address; use tcp://host:port, with port 0 to 65535")
        if brackets != (":" in bare) or any(letter in bare for letter in "[]/@?# ") or not bare.isascii():
            raise ValueError(f"{url!r} names no host; use tcp://host:port, for IPv6 tcp://[::1]:port")
        return cls(bare or LOOPBACK, int(port))


Address = UnixAddress | TcpAddress
