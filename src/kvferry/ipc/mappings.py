"""Mappings of other processes' memory: counted uses, one open per handle, one thread that unmaps.

Everything here is plain bookkeeping: the calls that map and unmap come in as functions, and no lock is held over them.
"""

from __future__ import annotations

import enum
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from kvferry.errors import DeadlineError, ShareError, StaleHandleError
from kvferry.ipc.mapping_records import MappingKey, MappingStats, Opened

_LOG = logging.getLogger(__name__)

# How long the unmapper stays once nothing is mapped; open and close in a loop then does not start a thread each time.
_LINGER_S = 1.0

# How often who waits for an entry looks at it anew: a released one may be taken into use again instead of going.
_LOOK_AGAIN_S = 0.02


class _State(enum.Enum):
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"


class _Entry:
    """One mapping. Fields are changed under the table's lock only; the two events are what others wait on."""

    def __init__(self, key: MappingKey) -> None:
        self.key = key
        self.state = _State.OPENING
        self.count = 0
        self.opened: Opened | None = None
        self.settled = threading.Event()  # open, or failed to open
        self.gone = threading.Event()  # not in the table any more


class MappingRef:
    """One use of a mapping; the memory stays mapped until the last use is released.

    `release` is idempotent and, like the finaliser, only puts a note into a queue: it never waits, takes no lock and
    makes no driver call, so it may run in any thread and at any moment.
    """

    def __init__(self, table: MappingTable, entry: _Entry) -> None:
        self._table = table
        self._held = [entry]
        assert entry.opened is not None
        self.key = entry.key
        self.address = entry.opened.address
        self.nbytes = entry.opened.nbytes

    def share(self) -> MappingRef:
        """Another use of the same mapping, to be released on its own.

        Raises:
            ShareError: this use has been released already.
        """
        held = list(self._held)
        if not held:
            raise ShareError(f"{self!r} was released before another use of it was asked for")
        return self._table._share(held[0])

    def release(self) -> None:
        try:
            entry = self._held.pop()  # atomic: of two threads that release, one finds it
        except IndexError:
            return
        self._table._enqueue(entry)

    @property
    def released(self) -> bool:
        return not self._held

    def __del__(self) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return f"<MappingRef {self.address:#x}+{self.nbytes} {state}>"


class MappingTable:
    """Mappings of other processes' memory: one per handle, counted, unmapped by one thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._released: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._unmapper: threading.Thread | None = None
        self._ending = False
        self._pid = os.getpid()
        self._opens = 0
        self._closes = 0
        self._close_failures = 0

    def acquire(self, key: MappingKey, opener: Callable[[], Opened], *, timeout_s: float = 30.0) -> MappingRef:
        """A use of the mapping that `key` names, made by `opener` when there is none yet.

        Blocks while another thread opens or closes the same handle, at most `timeout_s`; `opener` itself is not timed.

        Raises:
            StaleHandleError: the handle is mapped here for another allocation, and in use.
            DeadlineError: the other thread did not finish in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            entry, waits_on = self._find_or_insert(key)
            if waits_on is None:
                return self._open(entry, opener) if entry.opened is None else MappingRef(self, entry)
            if not waits_on.wait(min(_LOOK_AGAIN_S, timeout_s)) and time.monotonic() >= deadline:
                raise DeadlineError(
                    f"the mapping of {_name(key)} was still {entry.state.value} in another thread after {timeout_s} s"
                )

    def drain(self, timeout_s: float = 10.0) -> None:
        """Wait until all that has been released is unmapped.

        Raises:
            DeadlineError: it was not, after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            idle = self._idle()
            if not idle:
                return
            self._released.put(None)
            if not idle[0].gone.wait(min(_LOOK_AGAIN_S, timeout_s)) and time.monotonic() >= deadline:
                raise DeadlineError(f"{len(idle)} released mappings were not unmapped within {timeout_s} s")

    def unmapping(self) -> Callable[[], bool]:
        """What says, without waiting, whether all that has been released by now is unmapped, or in use again."""
        idle = self._idle()

        def ended() -> bool:
            with self._lock:
                self._apply_releases()
                return all(entry.gone.is_set() or entry.count > 0 for entry in idle)

        return ended

    def end(self, timeout_s: float = 2.0) -> None:
        """Unmap what has been released and end the thread, as the process ends; what is in use stays mapped.

        A thread that is still in a driver call when the interpreter goes away takes the process down with it.
        """
        unmapper = self._unmapper
        if unmapper is None or os.getpid() != self._pid:
            return
        self._ending = True
        self._released.put(None)
        unmapper.join(timeout_s)

    def stats(self) -> MappingStats:
        with self._lock:
            self._apply_releases()
            entries = list(self._entries.values())
            return MappingStats(
                mapped=len(entries),
                references=sum(entry.count for entry in entries),
                mapped_bytes=sum(entry.opened.nbytes for entry in entries if entry.opened is not None),
                opens=self._opens,
                closes=self._closes,
                close_failures=self._close_failures,
            )

    def _idle(self) -> list[_Entry]:
        """What is released and not unmapped."""
        with self._lock:
            self._apply_releases()
            return [e for e in self._entries.values() if e.count == 0 and e.state is not _State.OPENING]

    def _find_or_insert(self, key: MappingKey) -> tuple[_Entry, threading.Event | None]:
        """The entry of `key`, counted once more, and None; or an entry and the event to wait on before asking again."""
        with self._lock:
            self._apply_releases()
            entry = self._entries.get(key.handle)
            if entry is None:
                self._ensure_unmapper()  # may fail: nothing is entered then
                entry = self._entries[key.handle] = _Entry(key)
                entry.count = 1
                return entry, None
            if entry.state is _State.CLOSING:
                return entry, entry.gone
            if entry.state is _State.OPENING:
                return entry, entry.settled
            if entry.key == key:
                entry.count += 1
                return entry, None
            if entry.count > 0:
                raise StaleHandleError(
                    f"{_name(key)} has the handle of {_name(entry.key)}, which is mapped here and in use "
                    f"({entry.count} uses): the exporter freed that allocation and made another. Close the "
                    "wrappers and tensors of the old one first"
                )
            return entry, entry.gone

    def _open(self, entry: _Entry, opener: Callable[[], Opened]) -> MappingRef:
        try:
            opened = opener()
        except BaseException:
            with self._lock:
                del self._entries[entry.key.handle]
            entry.settled.set()
            entry.gone.set()
            raise
        with self._lock:
            entry.opened = opened
            entry.state = _State.OPEN
            self._opens += 1
        entry.settled.set()
        return MappingRef(self, entry)

    def _share(self, entry: _Entry) -> MappingRef:
        if os.getpid() != self._pid:  # forked: nobody counts or unmaps here, and the lock may be held for ever
            return MappingRef(self, entry)
        with self._lock:
            if entry.state is not _State.OPEN:  # released, by another thread, between the caller's look and the lock
                raise ShareError(f"{_name(entry.key)} was released before another use of it was asked for")
            entry.count += 1
        return MappingRef(self, entry)

    def _enqueue(self, entry: _Entry) -> None:
        if os.getpid() == self._pid:  # a forked child has the parent's references, not its mappings
            self._released.put(entry)

    def _apply_releases(self) -> None:
        """Count down for every note in the queue. Called with the lock held."""
        taken = False
        while True:
            try:
                entry = self._released.get_nowait()
            except queue.Empty:
                break
            taken = True
            if entry is not None:
                entry.count -= 1
        if taken and threading.current_thread() is not self._unmapper:
            self._released.put(None)  # the unmapper sleeps on this queue, and the note it waited for is gone

    def _ensure_unmapper(self) -> None:
        """Called with the lock held. The thread ends by itself once nothing is mapped."""
        if self._unmapper is not None and self._unmapper.is_alive():
            return
        unmapper = threading.Thread(target=self._unmap_loop, name="kvferry-unmapper", daemon=True)
        try:
            unmapper.start()
        except RuntimeError as error:
            raise ShareError(f"no thread can be started to unmap memory, so none is mapped: {error}") from error
        self._unmapper = unmapper

    def _unmap_loop(self) -> None:
        while True:
            note, waited_in_vain = None, False
            try:
                note = self._released.get(timeout=_LINGER_S)
            except queue.Empty:
                waited_in_vain = True
            with self._lock:
                if note is not None:
                    note.count -= 1
                self._apply_releases()
                idle = [e for e in self._entries.values() if e.state is _State.OPEN and e.count == 0]
                for entry in idle:
                    entry.state = _State.CLOSING
                if (not self._entries and waited_in_vain) or (self._ending and not idle):
                    self._unmapper = None
                    return
            if self._ending:
                self._released.put(None)  # looked at once more, then the end
            for entry in idle:
                self._unmap(entry)

    def _unmap(self, entry: _Entry) -> None:
        assert entry.opened is not None
        failed = False
        try:
            entry.opened.close()
        except Exception:  # noqa: BLE001 - tear-down goes on with the rest; the mapping ends with the process at the latest
            failed = True
            _LOG.exception("could not unmap %s at %#x", _name(entry.key), entry.opened.address)
        with self._lock:
            del self._entries[entry.key.handle]
            self._closes += 1
            self._close_failures += failed
        entry.gone.set()


def _name(key: MappingKey) -> str:
    return f"allocation {key.buffer_id} of process {key.exporter.hex()[:8]}"
