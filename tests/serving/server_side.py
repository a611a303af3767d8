"""A cache server in a child process, as commands."""

from __future__ import annotations

import threading
from typing import Any

from kvferry.ipc import process_table
from kvferry.server import CacheServer, ServerConfig


class ServerSide:
    """Starts the server when made."""

    def __init__(self, **config: Any) -> None:
        self.server = CacheServer(ServerConfig(**config))
        self.server.start()

    def mappings(self) -> dict[str, Any]:
        """What the process has mapped from others, and its threads."""
        stats = process_table().mappings.stats()
        return {"mapped": stats.mapped, "references": stats.references, "threads": threading.active_count()}

    def stop(self) -> None:
        self.server.stop()

    def close(self) -> None:
        self.server.stop()
