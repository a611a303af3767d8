"""A process that has imported all that routers and fake engines need, and forks them in a moment.

`python -m router.router_zygote FD`. Each request on its socket is one byte with one descriptor, which becomes the new
process's stdin and stdout; the answer is its pid. The first line there is its orders.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
from typing import Any

from kvferry.cli import route
from kvferry.cli.main import main as run_kvferry
from router.fake_engine import serve

IMPORTED_ONCE = route
PID = struct.Struct("<i")


def main() -> None:
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
            status = 1
            try:
                os.dup2(fds[0], 0)
                os.dup2(fds[0], 1)
                os.close(fds[0])
                status = obey(json.loads(read_line()))
            finally:
                os._exit(status)
        os.close(fds[0])
        control.sendall(PID.pack(pid))


def read_line() -> bytes:
    """A line and not a byte more."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def obey(orders: dict[str, Any]) -> int:
    """Be a router or an engine, until stdin closes; the exit status."""
    os.dup2(os.open(orders["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    if orders["kind"] == "router":
        sys.argv = ["kvferry", "route", "--until-stdin-closes", *orders["arguments"]]
        try:
            run_kvferry()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        return 0
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    serve(orders["name"], lambda port: print(port, flush=True), orders["port"])
    return 0


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
