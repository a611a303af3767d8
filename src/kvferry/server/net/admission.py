"""Who may connect, as far as the kernel knows, and how many at a time."""

from __future__ import annotations

import socket
from collections.abc import Collection

from kvferry.errors import RequestError
from kvferry.server.net.peer import credentials, groups_of, open_pidfd

MAX_STRANGERS = 64  # connections over TCP that have not shown a token yet


class Admission:
    """Checks peers. Over TCP everybody is a stranger until a token is shown (see Greeter)."""

    def __init__(
        self, *, own_uid: int, allow_uids: Collection[int] = (), group_id: int | None = None, max_sessions: int
    ) -> None:
        self._own_uid = own_uid
        self._allow_uids = allow_uids
        self._group_id = group_id
        self._max_sessions = max_sessions

    def admit(self, sock: socket.socket, num_sessions: int) -> tuple[str, int | None]:
        """The tenant and the pidfd of a new peer on the Unix socket. Raises RequestError where it may not connect."""
        peer = credentials(sock)
        self.check_uid(peer.uid, groups_of(sock) | {peer.gid} if self._group_id is not None else ())
        self.check_room(num_sessions)
        try:
            return f"uid:{peer.uid}", open_pidfd(sock)
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

    def check_room(self, num_sessions: int) -> None:
        """Raise RequestError where there are as many sessions as there may be."""
        if num_sessions >= self._max_sessions:
            raise RequestError("busy", f"{num_sessions} sessions are connected, which is all that max_sessions allows")
