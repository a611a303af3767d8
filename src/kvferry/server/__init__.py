"""The cache server: sockets, sessions, liveness, and the workers that copy."""

from kvferry.config import ServerConfig
from kvferry.server.server import CacheServer

__all__ = ["CacheServer", "ServerConfig"]
