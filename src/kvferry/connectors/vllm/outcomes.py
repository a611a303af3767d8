"""What a worker's side has to tell vLLM and the scheduler's side, until it is taken."""

from __future__ import annotations

from kvferry.connectors.vllm.plans import WorkReport


class Outcomes:
    """How loads, or transfers, have ended. One thread, vLLM's."""

    def __init__(self) -> None:
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._report = WorkReport()

    def take_received(self) -> set[str]:
        """Requests whose KV has come, or will not, since the last time."""
        taken, self._received = self._received, set()
        return taken

    def take_failed_blocks(self) -> set[int]:
        """Blocks that have not been filled, since the last time."""
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    @property
    def dropped(self) -> set[str]:
        """Requests whose loads were given up unended, until `take_report` tells of them."""
        return set(self._report.dropped)

    def take_report(self) -> WorkReport | None:
        """What to tell the scheduler's side; None where there is nothing."""
        if not self._report:
            return None
        taken, self._report = self._report, WorkReport()
        return taken
