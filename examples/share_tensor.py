"""Share one tensor's memory with another process, without copying it.

    python examples/share_tensor.py

Uses the GPU if there is one, else host memory: the code is the same. The child adds 1 to what it maps, and the parent
sees it in its own tensor.
"""

from __future__ import annotations

import socket
import subprocess
import sys

import torch

from kvferry import ipc


def child(fd: int) -> None:
    with socket.socket(fileno=fd) as sock:
        sock.sendall(b"+")  # up: importing torch may take longer than ipc waits for a peer
        (wrapper,) = ipc.recv(sock)
        with wrapper:
            wrapper.to_tensor().add_(1)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        sock.sendall(b".")


def parent() -> None:
    if torch.cuda.is_available():
        tensor = torch.zeros(4, 256, device="cuda")
        torch.cuda.synchronize()
    else:
        tensor = ipc.allocate_shared((4, 256), torch.float32)
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        ours.settimeout(60)
        ours.recv(1)
        with ipc.wrap(tensor) as wrapper:  # picks the wrapper that suits the memory
            print("sharing by", type(wrapper).__name__)
            ipc.send(ours, [wrapper])
            ours.settimeout(60)
            ours.recv(1)
        process.wait(timeout=60)
    print("sum is now", int(tensor.sum()), "of", tensor.numel(), "elements")


if __name__ == "__main__":
    child(int(sys.argv[1])) if len(sys.argv) > 1 else parent()
