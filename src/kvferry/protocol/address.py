"""Where a cache server is: a Unix socket's path, or a TCP host and port."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.settings import join_host_port, split_host_port

TCP_SCHEME = "tcp://"


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
        return f"{TCP_SCHEME}{join_host_port(self.host, self.port)}"

    @classmethod
    def parse(cls, url: str) -> TcpAddress:
        """The address in "tcp://host:port", "tcp://[::1]:port" or "tcp://:port", which is on loopback.

        Raises ValueError for anything else.
        """
        try:
            if not url.startswith(TCP_SCHEME):
                raise ValueError
            return cls(*split_host_port(url[len(TCP_SCHEME) :]))
        except ValueError:
            hint = "use tcp://host:port with a port of 0 to 65535, for IPv6 tcp://[::1]:port"
            raise ValueError(f"{url!r} is no TCP address; {hint}") from None


Address = UnixAddress | TcpAddress
