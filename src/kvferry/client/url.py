"""What a cache server is called by its clients."""

from __future__ import annotations

import re

from kvferry.protocol.address import TCP_SCHEME, Address, TcpAddress, UnixAddress

__all__ = ["Address", "TcpAddress", "UnixAddress", "parse_url"]

_UNIX_SCHEME = "unix:"
_HOST_AND_PORT = re.compile(r"[^/]*:[0-9]+")


def parse_url(url: str) -> Address:
    """The address in "unix:///path", "unix:path", "/path" or "tcp://host:port". Raises ValueError for anything else."""
    if url.startswith(TCP_SCHEME):
        address = TcpAddress.parse(url)
        if not address.port:
            raise ValueError(f"{url!r}: port 0 is no port to connect to; give the one that the server names")
        return address
    if url.startswith(_UNIX_SCHEME):
        path = url.removeprefix(_UNIX_SCHEME)
        path = path.removeprefix("//") if path.startswith("//") else path
    elif "://" in url:
        raise ValueError(f"{url!r} is no address of a cache server; use unix:///path/to/socket or tcp://host:port")
    elif _HOST_AND_PORT.fullmatch(url):
        raise ValueError(f"{url!r} is no address of a cache server; use tcp://{url}, or unix:///path/to/socket")
    else:
        path = url
    if not path:
        raise ValueError(f"{url!r} names no socket; use unix:///path/to/socket")
    return UnixAddress(path)
