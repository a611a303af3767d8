"""Which ways of sharing GPU memory and events work between processes in different namespaces, and how the rest fails.

Every cell is two real processes, exporter and importer, each started by `unshare` with the options of its column (so
that each has namespaces of its own), talking over a Unix socket in a folder that both see. Needs a GPU and root.

    python benchmarks/namespaces.py [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from kvferry import ipc

MECHANISMS = ("raw", "vmm", "torch", "event", "semaphore")
NAMESPACES = {
    "neither": (),
    "pid": ("--pid", "--fork", "--kill-child", "--mount-proc"),
    "ipc": ("--ipc",),
    "both": ("--pid", "--fork", "--kill-child", "--mount-proc", "--ipc"),
    # The /proc of the outer namespace, in which the process does not find itself. No container runtime leaves it so.
    "pid, outer /proc": ("--pid", "--fork", "--kill-child"),
}
LIMIT_S = 40.0


def export_tensor(sock: socket.socket, mechanism: str) -> str:
    tensor = torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with ipc.wrap(tensor, ipc.IPCPolicy(wrapper=mechanism)) as wrapper:
        ipc.send(sock, [wrapper], timeout_s=20)
        return sock.recv(4096).decode()


def import_tensor(sock: socket.socket) -> str:
    (wrapper,) = ipc.recv(sock, timeout_s=20)
    with wrapper:
        sums = int(wrapper.to_tensor().to(torch.int64).sum())
    return "works" if sums == 7 << 20 else f"WRONG BYTES: sum {sums}"


def export_event(sock: socket.socket, mechanism: str) -> str:
    with ipc.make_event_ring(0, isolated_ipc=mechanism == "semaphore") as ring:
        data, fds = ipc.encode_events(ring)
        sock.sendall(len(data).to_bytes(4, "little"))
        socket.send_fds(sock, [data], fds)
        for fd in fds:
            os.close(fd)
        answer = sock.recv(4096)
        if answer != b"r":
            return answer.decode()
        torch.cuda._sleep(400_000_000)
        ticket = ring.record(torch.cuda.current_stream().cuda_stream)
        sock.sendall(ticket.slot.to_bytes(4, "little") + ticket.value.to_bytes(8, "little"))
        return sock.recv(4096).decode()


def import_event(sock: socket.socket) -> str:
    size = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
    data, fds, _, _ = socket.recv_fds(sock, size, 8)
    events = ipc.open_events(data, fds)
    with events:
        sock.sendall(b"r")
        head = sock.recv(12, socket.MSG_WAITALL)
        ticket = ipc.Ticket(slot=int.from_bytes(head[:4], "little"), value=int.from_bytes(head[4:], "little"))
        early = events.query(ticket)
        events.wait(ticket, timeout_s=5)
    return "works" if not early else "WRONG: done before the work it follows"


def play(role: str, mechanism: str, path: str) -> None:
    """One side of one cell; the exporter prints what came out."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    is_event = mechanism in ("event", "semaphore")
    if role == "export":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            server.settimeout(30)
            sock, _ = server.accept()
        with sock:
            sock.settimeout(20)
            try:
                outcome = (export_event if is_event else export_tensor)(sock, mechanism)
            except Exception as error:  # noqa: BLE001  the error's text is the result
                outcome = f"exporter: {type(error).__name__}: {error}"
        print(outcome, flush=True)
        return
    with socket.socket(socket.AF_UNIX) as sock:
        until = time.monotonic() + 30
        while sock.connect_ex(path) != 0 and time.monotonic() < until:
            time.sleep(0.05)
        sock.settimeout(20)
        try:
            outcome = (import_event if is_event else import_tensor)(sock)
        except Exception as error:  # noqa: BLE001  the error's text is the result
            outcome = f"importer: {type(error).__name__}: {error}"
        sock.sendall(outcome.encode()[:4000])


def cell(mechanism: str, column: str, folder: pathlib.Path) -> dict[str, str]:
    path = str(folder / f"{mechanism}-{column}")
    env = dict(os.environ)
    if mechanism == "vmm":
        env["PYTORCH_CUDA_ALLOC_CONF"] = env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    unshare = ("unshare", *NAMESPACES[column]) if NAMESPACES[column] else ()
    command = (*unshare, sys.executable, __file__, "--mechanism", mechanism, "--path", path, "--role")
    sides = [
        subprocess.Popen((*command, role), env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for role in ("export", "import")
    ]
    try:
        out, err = sides[0].communicate(timeout=LIMIT_S)
        outcome = out.strip() or f"exporter died ({sides[0].returncode}): {err.strip().splitlines()[-1:]}"
    except subprocess.TimeoutExpired:
        outcome = f"no answer in {LIMIT_S:.0f} s"
    finally:
        for side in sides:
            side.kill()
            side.communicate()
    return {"mechanism": mechanism, "namespaces": column, "outcome": outcome}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--role", choices=("export", "import"), help=argparse.SUPPRESS)
    parser.add_argument("--mechanism", choices=MECHANISMS, help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        play(args.role, args.mechanism, args.path)
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(MECHANISMS)) as pool:
        for column in NAMESPACES:
            jobs = [pool.submit(cell, mechanism, column, pathlib.Path(folder)) for mechanism in MECHANISMS]
            rows += [job.result() for job in jobs]
    if args.json:
        print(json.dumps({"matrix": rows}, indent=1))
    else:
        for row in rows:
            print(f"{row['mechanism']:10} {row['namespaces']:16} {row['outcome']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
