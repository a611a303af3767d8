"""What the server says: frames for those who wait for them, and whether more can come."""

from __future__ import annotations

import enum
import socket
import threading
import time
from collections.abc import Callable

from kvferry.errors import ProtocolError
from kvferry.protocol.framing import receive, reply_reader
from kvferry.protocol.messages import Closed, Reply


class Heard(enum.Enum):
    """What the server has said: SOME and it may say more, ALL that will ever come, or GOODBYE."""

    SOME = "some"
    ALL = "all"
    GOODBYE = "goodbye"


class Incoming:
    """The reading side of one socket. Whoever holds `turn` reads, be it the reader's thread or a caller that waits.

    `deliver` takes each message; `hang_up` is told where nothing more is to be said to the server, and why.
    """

    def __init__(
        self, sock: socket.socket, *, deliver: Callable[[Reply], None], hang_up: Callable[[str], None]
    ) -> None:
        self.turn = threading.Lock()
        self.heard = Heard.SOME
        self.heard_at = time.monotonic()
        self._socket = sock
        self._deliver = deliver
        self._hang_up = hang_up
        self._frames = reply_reader()

    def read(self) -> None:
        """Take in what has come; notes it where that is the end. Needs the turn."""
        try:
            data, fds = receive(self._socket)
            self.heard_at = time.monotonic()
            if self.heard is Heard.GOODBYE:
                return
            if not data:
                self.heard = Heard.ALL
                self._hang_up("the server hung up")
                return
            self._frames.feed(data, fds)
            while (frame := self._frames.next_frame()) is not None:
                if isinstance(frame.message, Closed):
                    self.heard = Heard.GOODBYE
                    self._hang_up(frame.message.text)
                    return
                self._deliver(frame.message)
        except BlockingIOError:
            return
        except OSError as error:
            self.heard = Heard.ALL
            self._hang_up(f"the server went away: {error}")
        except BaseException as error:
            self._frames.close()
            self._frames = reply_reader()  # what comes now may be garbage, but its end says something
            what = "the server broke the protocol" if isinstance(error, ProtocolError) else "taking in an answer failed"
            self._hang_up(f"{what}: {error}")
            if not isinstance(error, Exception):  # an interrupt, in a caller's thread
                raise

    def close(self) -> None:
        """Give back what was received with frames that are not whole. Idempotent."""
        self._frames.close()
