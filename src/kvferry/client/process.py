"""The server's process: whether it can still touch our memory once it has hung up."""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import time

from kvferry.ipc.peer import open_pidfd

_LOOK_AGAIN_S = 0.5
_UNSEEN_S = 60.0  # how long a process of which nothing can be seen may take to end after its socket has closed
_PF_EXITING = 0x4  # include/linux/sched.h; a process has it before its sockets close by its end
_FLAGS = 6  # the place in /proc/<pid>/stat after the name


class _State(enum.Enum):
    LIVES = "lives"
    ENDING = "ending"  # its descriptors may be closed, its memory and its copies not
    GONE = "gone"
    UNSEEN = "unseen"


class ServerProcess:
    """The process at the other end of a socket, held by a pidfd where this kernel has one. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._pidfd = _pidfd_of(sock)

    def watch(self, poller: select.poll | select.epoll) -> None:
        """Have `poller` wake when the process is gone; see `is_gone`."""
        if self._pidfd is not None:
            poller.register(self._pidfd, select.POLLIN)

    def is_gone(self) -> bool:
        """Whether the process has ended, all of it; False where that cannot be seen."""
        if self._pidfd is None:
            return False
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def wait_until_it_cannot_copy(self) -> None:
        """Return once the process, which has closed its socket, does not read or write our memory any more.

        One that lives hangs up only when its copies for us have stopped. One that is ending closes its sockets before
        its copies have stopped; that is over when it is gone.
        """
        give_up_at = time.monotonic() + _UNSEEN_S
        poller = select.poll()
        self.watch(poller)
        while (state := self._state()) in (_State.ENDING, _State.UNSEEN):
            if state is _State.UNSEEN and time.monotonic() > give_up_at:
                return
            poller.poll(_LOOK_AGAIN_S * 1e3)

    def close(self) -> None:
        """Let go of the process. Idempotent."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _state(self) -> _State:
        flags = _flags_of(self._pidfd) if self._pidfd is not None else 0
        if self.is_gone():  # asked second: until here the process id was not another's
            return _State.GONE
        if not flags:
            return _State.UNSEEN
        return _State.ENDING if flags & _PF_EXITING else _State.LIVES


def _pidfd_of(sock: socket.socket) -> int | None:
    """None where this kernel or namespace has none, or the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        return open_pidfd(sock)
    return None


def _flags_of(pidfd: int) -> int:
    """The kernel's flags of the process; 0 where they cannot be seen, as those of another pid namespace."""
    try:
        with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as lines:
            pid = next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[_FLAGS])
    except (OSError, ValueError, LookupError, StopIteration):
        return 0
