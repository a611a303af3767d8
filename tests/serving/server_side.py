"""A cache server in a child process, as commands."""

from __future__ import annotations

import gc
import threading
from typing import Any

from doubles import copy_kernel
from doubles.fake_cuda import FakeDriver
from kvferry.cache.tiers import ChunkName
from kvferry.cache.tiers.remote import RemoteTier
from kvferry.cuda.driver import set_driver_for_testing
from kvferry.ipc import process_table
from kvferry.server import CacheServer, ServerConfig
from kvferry.server.net.patience import Patience
from serving.held_copies import HeldCopies
from serving.held_files import HeldFiles
from serving.meddling import Meddler


class ServerSide:
    """Starts the server when made; with `double`, over the driver's double, and `patience` as given."""

    def __init__(self, double: bool = False, patience: dict[str, float] | None = None, **config: Any) -> None:
        if double:
            driver = FakeDriver()
            copy_kernel.install(driver)
            set_driver_for_testing(driver)
        self.server = CacheServer(ServerConfig(**config), patience=Patience(**(patience or {})))
        self.server.start()

    def urls(self) -> dict[str, Any]:
        """Where it listens."""
        return {"urls": self.server.urls}

    def mappings(self) -> dict[str, Any]:
        """What the process has mapped from others, and its threads."""
        stats = process_table().mappings.stats()
        return {"mapped": stats.mapped, "references": stats.references, "threads": threading.active_count()}

    def threads(self) -> dict[str, Any]:
        """Their names."""
        return {"threads": sorted(thread.name for thread in threading.enumerate())}

    def stress_gc(self, threshold: int) -> None:
        """Collect garbage after so many new objects."""
        gc.set_threshold(threshold)

    def warm_up(self) -> None:
        """Have obstore open what it keeps open from its first call on, where there is a remote tier."""
        if self.server.config.remote_url is not None:
            RemoteTier(self.server.config.remote_url).find([ChunkName(bytes(32), bytes(32))])

    def hold_copy(self, at: int, stoppable: bool) -> None:
        """Have a copy into an engine wait; see `HeldCopies`."""
        self.held = HeldCopies(at, stoppable=stoppable)

    def holds(self) -> dict[str, Any]:
        return {"holds": self.held.holds.is_set()}

    def let_go(self) -> None:
        self.held.let_go()

    def hold_files(self, *, whole: bool = False) -> None:
        """Have the disk tier wait with its files; see `HeldFiles`."""
        self.files = HeldFiles(whole=whole)

    def files_held(self) -> dict[str, Any]:
        return {"held": self.files.num_held}

    def let_files_go(self) -> None:
        self.files.let_go()

    def meddle(self, what: str, rank: int, place: int) -> None:
        """Do something to a chunk behind the server's back; see `Meddler`."""
        getattr(Meddler(self.server), what)(rank, place)

    def stop(self) -> None:
        self.server.stop()

    def close(self) -> None:
        self.server.stop()
