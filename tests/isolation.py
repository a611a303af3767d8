"""A server and an engine in PID and IPC namespaces of their own (requirement I9), for the CPU and the GPU tests."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc")

# Prints its PID, how long registration took and what came of it; then stores and retrieves if it can.
ENGINE = """
import json, os, sys, time, torch
from kvferry import CacheClient, IPCPolicy, KVFerryError
url, device, wrapper = sys.argv[1:]
caches = {"layer": torch.zeros((2, 16, 16, 2, 32), dtype=torch.float16, device=device)}
said = {"pid": os.getpid()}
with CacheClient(url) as client:
    began = time.monotonic()
    try:
        policy = IPCPolicy(wrapper, isolated_ipc=wrapper == "vmm")
        client.register_kv_caches(caches, engine_id="e", model="m", format="vllm_flash_attention", policy=policy)
        said["outcome"] = "works"
    except KVFerryError as error:
        said["outcome"] = f"{type(error).__name__}: {error}"
    said["seconds"] = time.monotonic() - began
    if said["outcome"] == "works":
        cache = caches["layer"].normal_()
        tokens = list(range(64))
        until = time.monotonic() + 20
        while client.store(tokens, [3, 1, 4, 2]).wait(timeout_s=10).num_stored == 0 and time.monotonic() < until:
            time.sleep(0.05)  # the server's memory may not be ready yet
        found = client.lookup("r", tokens)
        client.retrieve(found.lease_id, [9, 8, 7, 6]).wait(timeout_s=10)
        said["equal"] = torch.equal(cache[:, [9, 8, 7, 6]], cache[:, [3, 1, 4, 2]])
print(json.dumps(said))
"""


@functools.cache
def missing_namespaces() -> str | None:
    """Why this process cannot make namespaces, or None."""
    try:
        done = subprocess.run((*UNSHARE, "true"), capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        return "no unshare command"
    return None if done.returncode == 0 else f"unshare: {done.stderr.strip()}"


@contextlib.contextmanager
def isolated_server(folder: Path, device: str) -> Iterator[str]:
    """A server in namespaces of its own; gives its URL."""
    path = folder / "kvferry.sock"
    arguments = ("serve", "--socket", str(path), "--memory", "16MiB", "--device", device)
    with subprocess.Popen((*UNSHARE, sys.executable, "-m", "kvferry", *arguments), stdout=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + 30
            while not path.exists():
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < until, "the server does not listen"
                time.sleep(0.05)
            yield f"unix://{path}"
        finally:
            server.kill()


def isolated_engine(url: str, device: str, wrapper: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What an engine in namespaces of its own has to say."""
    command = (*UNSHARE, sys.executable, "-c", ENGINE, url, device, wrapper)
    done = subprocess.run(
        command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said
