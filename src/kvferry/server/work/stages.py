"""One copy on its way, part by part: some chunks at a time, and where it goes in stages some planes at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.copy import CopyPlan, Steps
from kvferry.server.work.tasks import CopyTask, Direction


@dataclass(slots=True, eq=False)
class CopyOnItsWay:
    """The copy of one task: the stages before `stage` are in place, and of that the chunks before `next_chunk`."""

    task: CopyTask
    stage: int = 0
    next_chunk: int = 0
    damaged: int | None = None  # a chunk whose bytes are not what they were
    digests: list[bytes] = field(default_factory=list)  # of what was gathered
    seconds: float = 0.0  # that its parts took
    nbytes: int = 0
    num_stages: int = 1
    _whole: CopyPlan | None = None
    _stage: CopyPlan | None = None

    def begin(self, plan: CopyPlan) -> None:
        """Take what is to be copied."""
        self._whole = self._stage = plan
        if self.task.stages > 1:
            self.num_stages = min(self.task.stages, plan.chunks.planes.shape[1])
            self._stage = plan.stage(0, self.num_stages)

    @property
    def whole(self) -> CopyPlan:
        """All of it."""
        assert self._whole is not None
        return self._whole

    @property
    def plan(self) -> CopyPlan:
        """All of the stage that it is at."""
        assert self._stage is not None
        return self._stage

    @property
    def num_whole(self) -> int:
        """How many chunks are in place as a whole: none before the last stage."""
        return self.next_chunk if self.stage + 1 >= self.num_stages else 0

    @property
    def is_done(self) -> bool:
        """Whether all bytes are in place."""
        return self.num_whole == len(self.task.offsets)

    def end_stage(self) -> bool:
        """Go on to the next stage, where this one is in place and there is one; whether it did."""
        if self.is_done or self.next_chunk < len(self.task.offsets):
            return False
        self.stage, self.next_chunk = self.stage + 1, 0
        self._stage = self.whole.stage(self.stage, self.num_stages)
        return True


@dataclass(frozen=True, slots=True)
class Run:
    """The part of a copy that is under way: chunks up to `stop`, after which one is damaged, or not."""

    turn: tuple[int, Direction]
    part: CopyPlan
    steps: Steps
    stop: int
    damaged: bool
    began_at: float
