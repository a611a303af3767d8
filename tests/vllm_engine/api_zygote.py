"""A process that has imported vLLM's OpenAI server, which takes long, and forks such servers, and routers.

`python -m vllm_engine.api_zygote FD`. Each request on its socket is one byte with one descriptor, the new process's
stdin and stdout; the answer is its pid, which is also its process group. The first line there is its orders.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
from typing import Any

PID = struct.Struct("<i")


def main() -> None:
    from vllm.entrypoints.launchers.api_server.entry import main as serve  # not where vLLM's own children import this

    from kvferry.cli.main import main as kvferry

    # vLLM would have its engine and its worker import everything once more, each on its own.
    forking = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forking  # type: ignore[assignment]
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                orders = _orders(fds[0])
                sys.argv = orders["words"]
                if sys.argv[0] != "kvferry":  # a router looks after its stdin itself
                    threading.Thread(target=_end_with_stdin, daemon=True).start()
                (kvferry if sys.argv[0] == "kvferry" else serve)()
            finally:
                os._exit(0)
        os.close(fds[0])
        control.sendall(PID.pack(pid))


def _end_with_stdin() -> None:
    """End with all children as soon as the test hangs up, also where it was killed."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _orders(fd: int) -> dict[str, Any]:
    """What this process is to be; what it prints goes where it is told, but for a router's first line."""
    os.dup2(fd, 0)
    os.close(fd)
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    orders: dict[str, Any] = json.loads(line)
    log = os.open(orders["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.dup2(0 if orders["words"][0] == "kvferry" else log, 1)
    os.close(log)
    os.environ.update(orders.get("environ", {}))
    return orders


if __name__ == "__main__":
    main()
