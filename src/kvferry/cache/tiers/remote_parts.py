"""Where the objects of a folder (`file://`) are written before they get their names: what a killed server leaves there
is in one place, and goes. In a bucket there is no such thing: a request that breaks off leaves nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time

_STALE_S = 3600.0  # no write takes as long, on whatever host


class Parts:
    """Names below `folder` of the store at the path `root`, different each time and on each host. Thread-safe."""

    def __init__(self, root: str, folder: str) -> None:
        self._folder = folder
        self._path = os.path.join(root, folder)
        self._prefix = os.urandom(8).hex()
        self._numbers = itertools.count()
        self._swept = False

    def next(self) -> str:
        """A path of the store for an object to be written. The first call removes what others left there long ago."""
        if not self._swept:
            self._swept = True
            self._sweep()
        return f"{self._folder}/{self._prefix}-{next(self._numbers)}"

    def _sweep(self) -> None:
        """Also what obstore, which has names of its own for what it has not written whole, made of them."""
        before = time.time() - _STALE_S
        with contextlib.suppress(OSError), os.scandir(self._path) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # another host was first
                    if entry.stat(follow_symlinks=False).st_mtime < before:
                        os.unlink(entry.path)
