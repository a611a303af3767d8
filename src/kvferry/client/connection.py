"""The link to the server that there is, or the thread that makes the next one."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator

from kvferry.client.link import Link
from kvferry.errors import DeadlineError, KVFerryError, ServerGoneError
from kvferry.ipc.forks import tell_after_fork

_LOG = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
_GREETING_S = 2.0  # a server that takes longer is tried again
_TURN_S = 0.02
_MAX_TOLD = 32

OnEnd = Callable[[Link], None]
Dial = Callable[[float, OnEnd], Link]


class _Attempts:
    """How long to wait before the next one: longer and longer, and little again after a link that lasted.

    `failure` is why the last one failed.
    """

    def __init__(self) -> None:
        self.failure = ""
        self._pause_s = FIRST_PAUSE_S
        self._connected_at = 0.0

    def next_s(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, LAST_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)  # for many clients lose their server in the same moment

    def connected(self) -> None:
        self._connected_at = time.monotonic()

    def lost(self) -> None:
        self.failure = ""
        if time.monotonic() - self._connected_at > self._pause_s:
            self._pause_s = FIRST_PAUSE_S


class Connection:
    """Connected, cut off, or closed. Any thread may call; of no use in a forked child.

    While it is cut off a thread, `kvferry-reconnect`, tries again and again: `dial(timeout_s, on_end)` makes a link,
    `introduce(link)` tells the server who we are. Only a link on which both went well is given out. No two of those
    who change what the server knows of us are at it at one time; see `exclusive`.
    """

    def __init__(self, dial: Dial, introduce: Callable[[Link], None], *, timeout_s: float, required: bool) -> None:
        self._dial = dial
        self._introduce = introduce
        self._timeout_s = timeout_s
        self._turn = threading.Lock()  # that of `exclusive`; like a turn at a socket it is held over calls
        self._lock = threading.Lock()  # guards the fields below; held for a moment only
        self._link: Link | None = None
        self._attempt: Link | None = None
        self._former: list[Link] = []  # ended, and the server may still copy
        self._thread: threading.Thread | None = None
        self._why = ""  # how the last link ended, or why there was none
        self._attempts = _Attempts()
        self._closing = threading.Event()
        self._dropped = self._forked = False
        self.incarnation = b""
        tell_after_fork(self)
        try:
            self._connect(timeout_s)
        except KVFerryError as error:
            if required:
                raise
            self._why = str(error)
            _LOG.warning("%s; going on without, and trying again", self._why)
            with self._lock:
                self._start_thread()

    @property
    def connected(self) -> bool:
        """Whether calls reach a server now."""
        link = self._link
        return link is not None and link.usable

    @property
    def congested(self) -> bool:
        """Whether there is a server that does not read what it was sent."""
        link = self._link
        return link is not None and link.congested

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to another process."""
        return self._forked or self._closing.is_set()

    def check(self) -> None:
        """Raise ServerGoneError where no call can ever succeed: after closing, and in a forked child."""
        if self._forked:
            raise ServerGoneError("this client belongs to the parent process; make a new one in the forked child")
        if self._closing.is_set():
            raise ServerGoneError("this client was closed; make a new one")

    def link(self) -> Link | None:
        """The link, or None while there is none. Raises what `check` raises."""
        self.check()
        link = self._link
        return link if link is not None and link.usable else None

    def needed_link(self) -> Link:
        """The link. Raises ServerGoneError where there is none."""
        link = self.link()
        if link is None:
            raise self.gone()
        return link

    def gone(self) -> ServerGoneError:
        """Why there is no link now."""
        link = self._link
        why = self._why if link is None or link.usable else str(link.gone())
        reasons = "; since then: ".join(dict.fromkeys(reason for reason in (why, self._attempts.failure) if reason))
        return ServerGoneError(f"{reasons or 'the server was gone'}; trying to connect again")

    @contextlib.contextmanager
    def exclusive(self, *, interrupt: bool) -> Iterator[Link | None]:
        """The link, if there is one; while the body runs none is made, and nobody else is here.

        With `interrupt` an attempt that takes its time is given up. Raises DeadlineError where others do not end.
        """
        self.check()
        deadline = time.monotonic() + self._timeout_s
        while not self._turn.acquire(timeout=_TURN_S):
            if interrupt:
                self._give_up_attempt()
            if time.monotonic() > deadline:
                raise DeadlineError(f"other calls were busy with the registration for {self._timeout_s:g} s")
        try:
            yield self.link()
        finally:
            self._turn.release()

    def settle(self, timeout_s: float) -> bool:
        """Whether, within `timeout_s`, no server that we had before can copy for us any more."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            ended = [*self._former, *([self._link] if self._link is not None and not self._link.usable else [])]
        for link in ended:
            link.close(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._former = [link for link in self._former if not link.ended]
        return all(link.ended for link in ended)

    def close(self, timeout_s: float, farewell: Callable[[Link], None]) -> bool:
        """End what is going on, say `farewell` where there is a link, and hang up. For one caller.

        False where the server has not said within `timeout_s` that it is done with our memory.
        """
        if self._forked:  # where threads that are not here may hold the locks
            return True
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._give_up_attempt()
        with self._lock:
            thread, link = self._thread, self._link
        if thread is not None:
            thread.join(timeout_s)
        if link is not None and link.usable and self._turn.acquire(timeout=timeout_s):
            try:
                with contextlib.suppress(KVFerryError):  # a server that is gone, or gone wrong, is told by hanging up
                    farewell(link)
            finally:
                self._turn.release()
        if link is not None:
            link.close(max(0.0, deadline - time.monotonic()))
        return self.settle(max(0.0, deadline - time.monotonic()))

    def drop(self) -> None:
        """Have all threads end within a second or so. For finalisers: takes no lock."""
        self._dropped = True
        link = self._link
        if link is not None:
            link.drop()

    def after_fork(self) -> None:
        """In a forked child: there are neither threads nor sockets."""
        self._forked = True

    def _on_end(self, link: Link) -> None:
        """A link's reader says that nothing more can be said to the server."""
        with self._lock:
            self._former = [former for former in self._former if not former.ended]
            if link is not self._link:  # an attempt
                return
            self._former.append(link)
            self._link = None
            self._why = str(link.gone())  # no error: that would hold on to where it was raised
            if self._closing.is_set() or self._dropped:
                return
            self._attempts.lost()
            self._start_thread()
        _LOG.warning("%s; going on without, and trying again", self._why)

    def _start_thread(self) -> None:
        """Needs the lock."""
        self._thread = threading.Thread(target=self._reconnect, name="kvferry-reconnect", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # at the end of the process, or out of threads
            self._thread = None
            _LOG.error("no thread can be started to connect again: %s", error)

    def _give_up_attempt(self) -> None:
        with self._lock:
            attempt = self._attempt
        if attempt is not None:
            attempt.close(0.0, "the attempt was given up")

    def _reconnect(self) -> None:
        """The thread: until there is a link again, or nobody wants one."""
        told: set[str] = set()
        while not self._closing.wait(self._attempts.next_s()) and not self._dropped:
            try:
                self._connect(min(self._timeout_s, _GREETING_S))
            except ServerGoneError as error:
                self._attempts.failure = str(error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next attempt may go well
                self._attempts.failure = str(error) if isinstance(error, KVFerryError) else repr(error)
                if self._attempts.failure not in told and len(told) < _MAX_TOLD:
                    told.add(self._attempts.failure)
                    _LOG.warning("connecting again failed: %s; trying again", self._attempts.failure)
            else:
                return

    def _connect(self, timeout_s: float) -> None:
        """Make a link, and give it out once the server knows us."""
        link = self._dial(timeout_s, self._on_end)
        try:
            with self._lock:
                self._attempt = link
            self.check()
            if not self._turn.acquire(timeout=self._timeout_s):
                raise DeadlineError(f"other calls were busy with the registration for {self._timeout_s:g} s")
            try:
                self._introduce(link)
                with self._lock:
                    self._publish(link)
            finally:
                self._turn.release()
        except BaseException:
            link.close(self._timeout_s)
            raise
        finally:
            with self._lock:
                self._attempt = None

    def _publish(self, link: Link) -> None:
        """Needs the lock."""
        if self._closing.is_set() or self._dropped or not link.usable:
            raise link.gone()
        reconnected = self._thread is not None
        self._link, self._thread, self._why = link, None, ""
        self._attempts.connected()
        self.incarnation = link.greeting.incarnation
        if reconnected:
            _LOG.info("connected again")
