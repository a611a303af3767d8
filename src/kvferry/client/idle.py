"""What a link's reader sleeps on."""

from __future__ import annotations

import os
import select


class Idle:
    """An epoll object, and a descriptor that wakes who polls it; the link says what else is in it."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        try:
            self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            self.epoll.close()
            raise

    def wake(self) -> None:
        """Wake up who sleeps, now or when it tries to; from any thread, before `close`."""
        os.eventfd_write(self.wake_fd, 1)

    def close(self) -> None:
        """Close both descriptors; once."""
        os.close(self.wake_fd)
        self.epoll.close()
