"""Copies that wait until a test lets them go, in the server's process."""

from __future__ import annotations

import threading
from typing import Any

from kvferry.copy import HostCopier, Steps
from kvferry.server.work.device import HostDevice

_LONGEST_S = 30.0


class HeldCopies:
    """From now on the host's copies go chunk by chunk, and the one into an engine with number `at` waits.

    Without `stoppable` its bytes land whatever happens, like those that a DMA engine has begun to move.
    """

    def __init__(self, at: int, *, stoppable: bool) -> None:
        self.holds = threading.Event()
        self.go = threading.Event()
        self._steps = HostCopier.steps
        self._step_bytes = HostDevice.step_bytes
        steps, number = self._steps, 0

        def wait_and_copy(copier: HostCopier, plan: Any, *, to_flat: bool) -> Steps:
            nonlocal number
            number += not to_flat
            if number == at and not to_flat:
                self.holds.set()
                self.go.wait(_LONGEST_S)
            for done_bytes in steps(copier, plan, to_flat=to_flat):
                if stoppable or to_flat:
                    yield done_bytes

        HostCopier.steps = wait_and_copy  # type: ignore[assignment,method-assign]
        HostDevice.step_bytes = 1

    def let_go(self) -> None:
        """The copy goes on; later ones do not wait."""
        HostCopier.steps = self._steps  # type: ignore[method-assign]
        HostDevice.step_bytes = self._step_bytes
        self.go.set()
