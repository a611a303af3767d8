"""A process that has imported everything and forks servers and engines in a moment: `python -m serving.zygote FD`.

Each request on its socket is one byte with one descriptor, the new process's end of a socket; the answer is its pid.
The new process answers one line a command there, of which the first is `start`, until the end of the stream.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import struct
import sys
import traceback
from typing import Any

from doubles.nccl_side import NcclSide
from p2p.p2p_side import P2pSide
from serving.engine_side import EngineSide
from serving.server_side import ServerSide
from soak.doomed_side import DoomedSide
from soak.load_side import LoadSide

KINDS = {
    "server": ServerSide,
    "engine": EngineSide,
    "load": LoadSide,
    "doomed": DoomedSide,
    "nccl": NcclSide,
    "p2p": P2pSide,
}

PID = struct.Struct("<i")


def serve(sock: socket.socket) -> None:
    """Answer commands on `sock` until it closes."""
    lines = sock.makefile("rb")
    side: Any = None
    try:
        for line in lines:
            command = json.loads(line)
            op = command.pop("op")
            try:
                if op == "start":
                    side = KINDS[command.pop("kind")](**command)
                    result: dict[str, Any] = {}
                else:
                    result = getattr(side, op)(**command) or {}
                reply = {"ok": True, **result}
            except Exception as error:  # noqa: BLE001 - the test is told
                reply = {
                    "ok": False,
                    "kind": type(error).__name__,
                    "error": str(error),
                    "trace": traceback.format_exc(),
                }
            sock.sendall(json.dumps(reply).encode() + b"\n")
    except ConnectionError:
        pass
    finally:
        if side is not None:
            side.close()


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    gc.freeze()  # else collections in the children copy the pages of all that was imported
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status = 1
            try:
                serve(socket.socket(fileno=fds[0]))
                status = 0
            finally:
                os._exit(status)
        os.close(fds[0])
        control.sendall(PID.pack(pid))


if __name__ == "__main__":
    main()
