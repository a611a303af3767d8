"""A process that has imported vLLM, which takes long, and forks engines and cache servers.

`python -m vllm_engine.engine_zygote FD`. Each request on its socket is one byte with one descriptor, the new process's
end of a socket; the answer is its pid. The first line that comes there is its orders: an engine answers one line a
command until the end of the stream; a server has the socket as its stdin and stdout.
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
    from kvferry.cli.main import main as kvferry  # not where vLLM's own children import this file again
    from vllm_engine.engine_side import EngineSide

    fork_on_demand(EngineSide, kvferry)


def fork_on_demand(start: Any, kvferry: Any) -> None:
    """Fork processes that run what `start` makes, or `kvferry serve`, until the socket's other end is closed."""
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
                sock = socket.socket(fileno=fds[0])
                orders = json.loads(read_line(sock))
                _redirect(orders.pop("log"))
                if orders["op"] == "serve":
                    serve(sock, orders["arguments"], kvferry)
                else:
                    answer(sock, orders, start)
            finally:
                os._exit(0)
        os.close(fds[0])
        control.sendall(PID.pack(pid))


def read_line(sock: socket.socket) -> bytes:
    """A line and not a byte more."""
    line = b""
    while not line.endswith(b"\n") and (byte := sock.recv(1)):
        line += byte
    return line


def serve(sock: socket.socket, arguments: list[str], kvferry: Any) -> None:
    """The command `kvferry serve`."""
    os.dup2(sock.fileno(), 0)
    os.dup2(sock.fileno(), 1)
    sock.close()
    sys.argv = ["kvferry", "serve", *arguments]
    kvferry()


def answer(sock: socket.socket, command: dict[str, Any], start: Any) -> None:
    """Answer commands, of which the first is the arguments of `start`."""
    side: Any = None
    lines = sock.makefile("rb")
    try:
        while command:
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
            command = json.loads(lines.readline() or b"{}")
    except ConnectionError:
        pass
    finally:
        if side is not None:
            with contextlib.suppress(Exception):
                side.close()


def _redirect(log: str) -> None:
    """Everything that is printed goes into the file `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


if __name__ == "__main__":
    main()
