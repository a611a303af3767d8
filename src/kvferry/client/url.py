"""Where a cache server is."""

from __future__ import annotations

SCHEME = "unix:"


def socket_path(url: str) -> str:
    """The path in "unix:///path", "unix:path" or "/path". Raises ValueError for anything else."""
    if url.startswith(SCHEME):
        path = url.removeprefix(SCHEME)
        path = path.removeprefix("//") if path.startswith("//") else path
    elif "://" in url:
        raise ValueError(f"{url!r} is no address of a cache server; use unix:///path/to/socket")
    else:
        path = url
    if not path:
        raise ValueError(f"{url!r} names no socket; use unix:///path/to/socket")
    return path
