"""Buffers of a few slots, lent in turns to whoever waits for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from kvferry.errors import TransferError
from kvferry.p2p.carriers.pushes.run import Part, Run

OnDone = Callable[[Exception | None], None]


class Copies(Protocol):
    """Fills and empties slots. `copy` is called in the thread of the lane that uses them."""

    def prepare(self, run: Run) -> None:
        """Work out what the copies of a run will need, before one of them is waited for. In any thread."""

    def copy(self, part: Part, slot: int, on_done: OnDone, *, to_flat: bool) -> None:
        """Start to copy a part into the slot at that address, or (not `to_flat`) from there to where it is to lie.

        `on_done` is called, in the order of the calls and in any thread, once all of it is there, or has failed.
        """


class Buffer(NamedTuple):
    """Slots at these addresses, of `slot_bytes` bytes each."""

    slots: tuple[int, ...]
    slot_bytes: int
    copies: Copies


class Waiter(Protocol):
    """Who may get a buffer."""

    def pump(self) -> None:
        """There may be one again."""


class Loan:
    """What one waiter has of some buffers: one, or none. For the loop's thread."""

    def __init__(self, buffers: Buffers, waiter: Waiter, failed: Callable[[Exception], None]) -> None:
        """`failed` is told where there never will be one."""
        self._buffers = buffers
        self._waiter = waiter
        self._failed = failed
        self.buffer: Buffer | None = None

    @property
    def is_due(self) -> bool:
        """Whether others wait for one, so that it should be given back soon."""
        return self._buffers.are_waited_for

    def take(self) -> Buffer | None:
        """One, where there is none yet; or None: the waiter's `pump` is called when there may be one."""
        try:
            self.buffer = self._buffers.take(self._waiter)
        except TransferError as error:
            self._failed(error)
        return self.buffer

    def forget(self) -> None:
        """None is waited for any more."""
        self._buffers.forget(self._waiter)

    def lose(self) -> None:
        """The GPU may use it for ever."""
        if self.buffer is not None:
            self.buffer = None
            self._buffers.lose()

    def give_back(self) -> None:
        """Nothing uses it any more; nothing happens where there is none."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            self._buffers.give_back(buffer)


class Buffers:
    """For the loop's thread. Each waiter has at most one, the largest, and gets it after those who waited before.

    Where one is free nobody waits.
    """

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._free = list(buffers)
        self._lent = 0
        self._waiting: deque[Waiter] = deque()

    @property
    def are_waited_for(self) -> bool:
        """Whether who has one should give it back soon."""
        return bool(self._waiting)

    def take(self, waiter: Waiter) -> Buffer | None:
        """A buffer, or None: `pump` is called when there may be one. Raises TransferError where all have been lost."""
        if not (self._free or self._lent):
            raise TransferError("failed", "the GPU has never ended with what was in the buffers: restart this engine")
        if waiter not in self._waiting:
            self._waiting.append(waiter)
        if not self._free or self._waiting[0] is not waiter:
            return None
        self._waiting.popleft()
        self._lent += 1
        largest = max(self._free, key=lambda buffer: buffer.slot_bytes)
        self._free.remove(largest)
        return largest

    def forget(self, waiter: Waiter) -> None:
        """It wants none any more."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)

    def give_back(self, buffer: Buffer) -> None:
        """Nothing uses it any more."""
        self._lent -= 1
        self._free.append(buffer)
        self._pump()

    def lose(self) -> None:
        """One that was lent will never be given back: the GPU may still use it."""
        self._lent -= 1
        self._pump()

    def _pump(self) -> None:
        for waiter in list(self._waiting):
            waiter.pump()
