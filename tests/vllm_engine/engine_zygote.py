"""A process that has imported vLLM, which takes long, and forks engines: `python -m vllm_engine.engine_zygote FD`.

Each request on its socket is one byte with one descriptor, the new process's end of a socket; the answer is its pid.
The new process answers one line a command there until the end of the stream.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import traceback
from typing import Any

PID = struct.Struct("<i")


def main() -> None:
    from vllm_engine.engine_side import EngineSide  # not where vLLM's own children import this file again

    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                answer(socket.socket(fileno=fds[0]), EngineSide)
            finally:
                os._exit(0)
        os.close(fds[0])
        control.sendall(PID.pack(pid))


def answer(sock: socket.socket, start: Any) -> None:
    """Answer commands, of which the first is the arguments of `start`."""
    side: Any = None
    try:
        for line in sock.makefile("rb"):
            command = json.loads(line)
            op = command.pop("op")
            try:
                if op == "start":
                    side = start(**command)
                    reply: dict[str, Any] = {"ok": True}
                else:
                    reply = {"ok": True, **(getattr(side, op)(**command) or {})}
            except Exception:  # noqa: BLE001 - the test is told
                reply = {"ok": False, "error": traceback.format_exc()}
            sock.sendall(json.dumps(reply).encode() + b"\n")
    except ConnectionError:
        pass
    finally:
        if side is not None:
            with contextlib.suppress(Exception):
                side.close()


if __name__ == "__main__":
    main()
