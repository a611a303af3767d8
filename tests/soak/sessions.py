"""Sessions opened and dropped in every way that there is: `cd tests && python -m soak.sessions NUMBER`.

Prints, ten times on the way, what the server's process then has: resident memory and open files.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path

from kvferry.protocol.framing import encode_frame
from kvferry.protocol.messages import Hello, Ping
from serving.process import Stage, Zygote, eventually
from serving.raw import Raw
from serving.tokens import TOKENS, challenged, hello_of, token_file, welcomed

_RESET = struct.pack("ii", 1, 0)


def open_and_drop(path: str, tcp: str, number: int) -> None:
    """The `number`-th connection; what it does before it ends follows from the number."""
    token = TOKENS["a"]
    kind = number % 7
    if kind == 0:
        raw = Raw(path)  # says nothing
    elif kind == 1:
        raw = Raw(path, Hello(2, 1))
        raw.reply()
    elif kind == 2:
        raw = Raw(path, Ping(1))  # is refused
        raw.until_end()
    elif kind == 3:
        raw = Raw(tcp)
        raw.socket.sendall(encode_frame(hello_of(token))[: number % 40])
    elif kind == 4:
        raw, _ = challenged(tcp, token)
    elif kind == 5:
        raw = welcomed(tcp, token)
    else:
        raw = Raw(tcp, Hello(1, 1))  # is refused
        raw.reply()
    if number % 3 and raw.socket.family != socket.AF_UNIX:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # resets
    raw.close()


def footprint(pid: int) -> tuple[int, int]:
    """Resident bytes, and open files, of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE"), len(os.listdir(f"/proc/{pid}/fd"))


def main() -> None:
    count = int(sys.argv[1])
    zygote = Zygote()
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(zygote, Path(folder), listen="tcp://127.0.0.1:0", token_file=token_file(Path(folder)))
        _, tcp = stage.server.call("urls")["urls"]
        watcher = welcomed(stage.path, TOKENS["a"])
        started = time.monotonic()
        for number in range(count + 1):
            if number % max(1, count // 10) == 0:
                eventually(lambda: watcher.stats()["sessions"] == 1, 20)
                resident, files = footprint(stage.server.pid)
                took = time.monotonic() - started
                print(f"{number} sessions, {took:.1f} s: {resident >> 10} KiB, {files} files", flush=True)
            open_and_drop(stage.path, tcp, number)
        print({name: value for name, value in watcher.stats().items() if name.startswith("sessions")})
        watcher.close()
        stage.close()
    zygote.close()


if __name__ == "__main__":
    main()
