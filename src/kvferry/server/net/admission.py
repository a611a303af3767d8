"""Who may connect, as far as the kernel knows, and how many at a time."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from kvferry.errors import RequestError
from kvferry.ipc.peer import credentials, groups_of, open_pidfd

MAX_STRANGERS = 64  # connections over TCP that have not shown a token yet


class Admitted(NamedTuple):
    """A peer on the Unix socket; `own` where it runs as the server's own user."""

    tenant: str
    pidfd: int | None
    own: bool


class Admission:
    """Checks peers. Over TCP everybody is a stranger until a token is shown (see Greeter)."""

    def __init__(
        self,
        *,
        own_uid: int,
        allow_uids: Collection[int] = (),
        group_id: int | None = None,
        max_sessions: int,
        tenant_sessions: int,
    ) -> None:
        self._own_uid = own_uid
        self._allow_uids = allow_uids
        self._group_id = group_id
        self._max_sessions = max_sessions
        self._tenant_sessions = tenant_sessions

    def admit(self, sock: socket.socket, sessions: Counter[str]) -> Admitted:
        """A new peer on the Unix socket, beside so many sessions of each tenant. Raises RequestError to refuse it."""
        peer = credentials(sock)
        self.check_uid(peer.uid, groups_of(sock) | {peer.gid} if self._group_id is not None else ())
        self.check_room(f"uid:{peer.uid}", sessions)
        try:
            return Admitted(f"uid:{peer.uid}", open_pidfd(sock), peer.uid == self._own_uid)
        except ProcessLookupError:
            raise RequestError("gone", f"process {peer.pid} ended before it was accepted") from None

    def check_uid(self, uid: int, groups: Collection[int]) -> None:
        """Raise RequestError unless that user, or one of its groups, may connect."""
        if uid == self._own_uid or uid in self._allow_uids or self._group_id in groups:
            return
        group = "" if self._group_id is None else f", or make it a member of group {self._group_id}"
        raise RequestError(
            "uid",
            f"this server runs as uid {self._own_uid} and you as uid {uid}; "
            f"start it with uid {uid} among allow_uids{group}",
        )

    def check_room(self, tenant: str, sessions: Counter[str]) -> None:
        """Raise RequestError where there are as many sessions as there may be, in all or of that tenant."""
        num_sessions = sessions.total()
        if num_sessions >= self._max_sessions:
            raise RequestError("busy", f"{num_sessions} sessions are connected, which is all that max_sessions allows")
        self.check_share(tenant, sessions)

    def check_share(self, tenant: str, sessions: Counter[str]) -> None:
        """The same, for who has a place, but not yet as that tenant."""
        if sessions[tenant] >= self._tenant_sessions:
            raise RequestError(
                "tenant_busy",
                f"{sessions[tenant]} sessions of {tenant} are connected, which is all that tenant_sessions allows",
            )
