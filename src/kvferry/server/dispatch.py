"""Which handler answers which message, and what becomes of its errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.errors import KVFerryError, ProtocolError, RequestError
from kvferry.protocol.framing import Frame
from kvferry.protocol.messages import (
    NO_SEQ,
    Attach,
    Cancel,
    Clear,
    Confirm,
    Error,
    FdBatch,
    Lookup,
    Ping,
    Pong,
    Prefetch,
    Register,
    Release,
    Request,
    Retrieve,
    Store,
    Unregister,
)
from kvferry.server.failures import failure_of
from kvferry.server.jobs import Jobs
from kvferry.server.lookups import Lookups
from kvferry.server.net.greeter import Greeter
from kvferry.server.registrar import Registrar
from kvferry.server.session import Session
from kvferry.server.work.tasks import Failure

_LOG = logging.getLogger(__name__)

_SINCE_2 = (Prefetch, Clear)

Handler = Callable[[Session, Any], None]


def make_handlers(registrar: Registrar, lookups: Lookups, jobs: Jobs) -> dict[type[Request], Handler]:
    """What answers each kind of request of a session that is welcome; FdBatch goes to the registrar as a frame."""
    return {
        Lookup: lookups.lookup,
        Release: lookups.release,
        Attach: lookups.attach,
        Prefetch: lookups.prefetch,
        Clear: lookups.clear,
        Store: jobs.store,
        Retrieve: jobs.retrieve,
        Cancel: jobs.cancel,
        Register: registrar.register,
        Confirm: registrar.confirm,
        Unregister: registrar.unregister,
        Ping: lambda session, message: session.send(Pong(message.seq)),
    }


class Dispatcher:
    """Hands frames to whoever answers them, in the loop's thread. `refuse(session, failure)` ends who is not welcome.

    A request that fails is answered with an Error, and its session goes on; a ProtocolError is raised, and ends it.
    """

    def __init__(
        self,
        greeter: Greeter,
        registrar: Registrar,
        *,
        handlers: Mapping[type[Request], Handler],
        refuse: Callable[[Session, Failure], None],
    ) -> None:
        self._greeter = greeter
        self._registrar = registrar
        self._handlers = handlers
        self._refuse = refuse

    def handle(self, session: Session, frame: Frame[Request]) -> None:
        """Take one frame, with its descriptors. Raises ProtocolError."""
        message = frame.message
        try:
            if isinstance(message, FdBatch):
                self._registrar.take_fds(session, frame)
            elif not session.welcome:
                self._greeter.take(session, message)
            else:
                self._answer(session, message)
        except ProtocolError:
            raise
        except (KVFerryError, ValueError) as error:
            failure = failure_of(error)
            if session.welcome:
                session.send(Error(getattr(message, "seq", NO_SEQ), failure.code, failure.text))
            else:
                self._refuse(session, failure)
        except Exception as error:
            _LOG.exception("session %d: %s failed", session.session_id, type(message).__name__)
            raise ProtocolError(f"the server failed in {type(message).__name__}: {type(error).__name__}") from error

    def _answer(self, session: Session, message: Request) -> None:
        name, handler = type(message).__name__, self._handlers.get(type(message))
        if isinstance(message, _SINCE_2) and session.greeting.version < 2:
            raise RequestError("version", f"{name} is not in protocol 1, which this session speaks")
        if handler is None:
            raise ProtocolError(f"{name} came after the greeting was over")
        handler(session, message)
