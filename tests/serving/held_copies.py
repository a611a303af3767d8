"""Copies that wait until a test lets them go, in the server's process."""

from __future__ import annotations

import threading
from typing import Any

from kvferry.copy import HostCopier
from kvferry.server.work.device import HostDevice

_LONGEST_S = 30.0


class HeldCopies:
    """From now on the host's copies go chunk by chunk, and the one into an engine with number `at` waits.

    Without `stoppable` its bytes land whatever happens, like those that a DMA engine has begun to move.
    """

    def __init__(self, at: int, *, stoppable: bool) -> None:
        self.holds = threading.Event()
        self.go = threading.Event()
        self._scatter = HostCopier.scatter
        self._step_bytes = HostDevice.step_bytes
        scatter, number = self._scatter, 0

        def wait_and_scatter(copier: HostCopier, plan: Any, cancelled: Any = None) -> None:
            nonlocal number
            number += 1
            if number == at:
                self.holds.set()
                self.go.wait(_LONGEST_S)
            scatter(copier, plan, cancelled if stoppable else None)

        HostCopier.scatter = wait_and_scatter  # type: ignore[assignment,method-assign]
        HostDevice.step_bytes = 1

    def let_go(self) -> None:
        """The copy goes on; later ones do not wait."""
        HostCopier.scatter = self._scatter  # type: ignore[method-assign]
        HostDevice.step_bytes = self._step_bytes
        self.go.set()
