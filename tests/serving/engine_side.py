"""An engine in a child process, as commands: a paged KV cache whose blocks have bytes that tell what they belong to."""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from doubles.fake_cuda import FakeDriver
from kvferry.client import CacheClient
from kvferry.client import connection as connection_module
from kvferry.client.link import Link
from kvferry.cuda.device import bound
from kvferry.cuda.driver import set_driver_for_testing
from kvferry.cuda.memory import tensor_from_pointer
from kvferry.errors import KVFerryError
from kvferry.ipc.events import EventRing

BLOCK_SIZE = 16
CHUNK_BLOCKS = 4
CHUNK_TOKENS = BLOCK_SIZE * CHUNK_BLOCKS
FORMAT = "vllm_flash_attention"


def prompt(seed: int, num_tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The tokens of prompt number `seed`; prompts of one seed are prefixes of each other."""
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens, dtype=np.int32)


def double_memory(shape: Sequence[int]) -> torch.Tensor:
    """A float32 tensor in an allocation of the driver's double, which is installed by that."""
    set_driver_for_testing(FakeDriver())
    nbytes = math.prod(shape) * 4
    with bound(0) as driver:
        address = driver.mem_alloc(nbytes)
    return tensor_from_pointer(address, nbytes, device=0, owner=None).view(torch.float32).view(*shape).zero_()


def link_of(client: CacheClient) -> Link:
    """The connection that the client has now."""
    link = client._connection.link()
    assert link is not None
    return link


class Asking:
    """A thread that looks up, like the scheduler of an engine that goes on whatever becomes of the server."""

    def __init__(self, client: CacheClient, tokens: Any) -> None:
        self._client = client
        self._tokens = tokens
        self._over = threading.Event()
        self._counts = {"hits": 0, "misses": 0}
        self._errors: list[str] = []
        self._longest_s = 0.0
        self._thread = threading.Thread(target=self._run, name="asking")
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            started = time.monotonic()
            try:
                found = self._client.lookup(f"asked {number}", self._tokens)
                self._client.release(found.lease_id)
            except KVFerryError as error:
                self._errors.append(f"{type(error).__name__}: {error}")
            else:
                self._counts["hits" if found.tokens else "misses"] += 1
            self._longest_s = max(self._longest_s, time.monotonic() - started)
            self._over.wait(0.001)

    def stop(self) -> dict[str, Any]:
        self._over.set()
        self._thread.join(30)
        return {**self._counts, "errors": self._errors[:3], "longest_s": self._longest_s}


class EngineSide:
    """One rank. `heads` scales the bytes of a block: 2 layers x (K, V) x 16 tokens x heads x 8 x 4 bytes.

    `device` is torch's, or "double": memory of the driver's double.
    """

    def __init__(
        self,
        url: str,
        num_blocks: int = 64,
        heads: int = 8,
        *,
        block_size: int = BLOCK_SIZE,
        device: str = "cpu",
        token: str | None = None,
    ) -> None:
        self.device = device
        shape = (2, 2, num_blocks, block_size, heads, 8)
        cache = double_memory(shape) if device == "double" else torch.zeros(shape, device=device)
        self.client = CacheClient(url, token=token)
        self.layers = list(cache.unbind(0))
        self.jobs: list[Any] = []
        self.forked: list[int] = []

    def register(self, engine_id: str = "e", model: str = "m", rank: int = 0, world_size: int = 1) -> dict[str, Any]:
        """Register, and check that no byte of the cache has changed by that."""
        before = [layer.clone() for layer in self.layers]
        self.client.register_kv_caches(
            {f"layer.{index}": layer for index, layer in enumerate(self.layers)},
            engine_id=engine_id,
            model=model,
            format=FORMAT,
            rank=rank,
            world_size=world_size,
        )
        assert all(torch.equal(a, b) for a, b in zip(before, self.layers, strict=True))
        return self.inode_of() if self.device == "cpu" else {}

    def unregister(self) -> None:
        self.client.unregister()

    def attach(self, engine_id: str = "e") -> dict[str, Any]:
        return {"ready": self.client.attach(engine_id)}

    def inode_of(self) -> dict[str, Any]:
        """The file in which the cache lies."""
        registration = self.client._presence.registration
        assert registration is not None
        return {"inode": registration.storages.wrappers[0].descriptor.inode}  # type: ignore[attr-defined]

    def fill(self, blocks: Sequence[int], seed: int) -> dict[str, Any]:
        """Write the KV of prompt `seed` (random bytes) into blocks; the digest of what they hold."""
        generator = torch.Generator().manual_seed(seed)
        for position, block in enumerate(blocks):
            for layer in self.layers:
                values = torch.randn(layer[:, 0].shape, generator=generator) + position
                layer[:, block] = values.to(layer.device)
        return self.digest(blocks)

    def wipe(self, value: float = -1.0) -> None:
        for layer in self.layers:
            layer.fill_(value)

    def digest(self, blocks: Sequence[int]) -> dict[str, Any]:
        """What blocks hold, block by block."""
        held = [
            b"".join(layer[:, block].cpu().contiguous().numpy().tobytes() for layer in self.layers) for block in blocks
        ]
        return {"digest": [hashlib.sha256(data).hexdigest() for data in held]}

    def store(
        self, seed: int, num_tokens: int, blocks: Sequence[int], start: int = 0, wait: bool = True
    ) -> dict[str, Any]:
        job = self.client.store(prompt(seed, num_tokens), blocks, start)
        self.jobs.append(job)
        if not wait:
            return {}
        result = job.wait(20)
        return {"stored": result.num_stored, "present": result.num_present, "skipped": result.num_skipped}

    def stick(self) -> None:
        """From now on this engine's events never happen, as if its GPU hung."""
        registration = self.client._presence.registration
        assert registration is not None
        ring: EventRing = registration.ring
        ring._signal = lambda ticket, stream: None  # type: ignore[method-assign]

    def spin(self, seconds: float) -> None:
        """Keep the GPU's current stream busy."""
        torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]

    def lookup(self, seed: int, num_tokens: int, request: str = "r", wait_s: float = 0.0) -> dict[str, Any]:
        found = self.client.lookup(request, prompt(seed, num_tokens), wait_s=wait_s)
        return {"tokens": found.tokens, "lease": found.lease_id, "coming": found.coming}

    def prefetch(self, seed: int, num_tokens: int) -> dict[str, Any]:
        found = self.client.prefetch(prompt(seed, num_tokens))
        return {"tokens": found.tokens, "coming": found.coming}

    def clear(self, seed: int | None = None, num_tokens: int = 0) -> dict[str, Any]:
        return {"cleared": self.client.clear(None if seed is None else prompt(seed, num_tokens))}

    def retrieve(self, lease: int, blocks: Sequence[int], skip: int = 0, stages: int = 1) -> dict[str, Any]:
        job = self.client.retrieve(lease, blocks, skip, stages=stages)
        try:
            job.wait(20)
        except KVFerryError as error:
            return {"failed": list(job.failed_block_ids), "error": f"{type(error).__name__}: {error}"}
        return {"failed": [], "error": None}

    def cancel(self, job: int = -1) -> dict[str, Any]:
        return {"stopped": self.jobs[job].cancel()}

    def job(self, job: int = -1, within_s: float = 10.0) -> dict[str, Any]:
        """How a job ended, waiting for that."""
        deadline = time.monotonic() + within_s
        while not self.jobs[job].done() and time.monotonic() < deadline:
            time.sleep(0.002)
        return {"done": self.jobs[job].done(), "error": str(self.jobs[job].error or "")}

    def release(self, lease: int) -> None:
        self.client.release(lease)

    def stats(self) -> dict[str, Any]:
        return {"stats": self.client.stats()}

    def ping(self) -> dict[str, Any]:
        started = time.perf_counter()
        self.client.ping()
        return {"ms": (time.perf_counter() - started) * 1e3}

    def connected(self) -> dict[str, Any]:
        return {"connected": self.client.connected, "incarnation": self.client.incarnation.hex()}

    def hang_up(self) -> None:
        """Lose the connection to a server that lives, as by a mistake in the protocol."""
        link_of(self.client)._hang_up("lost by the test")

    def impatient(self) -> None:
        """Try to connect again at short intervals, however short the connections are."""
        connection_module.LAST_PAUSE_S = connection_module.FIRST_PAUSE_S

    def keep_asking(self, seed: int, num_tokens: int) -> None:
        """Have a thread look up, and release, all the time; until `stop_asking`."""
        self._asking = Asking(self.client, prompt(seed, num_tokens))

    def stop_asking(self) -> dict[str, Any]:
        """How often the thread found something and nothing, and what was raised."""
        return self._asking.stop()

    def fork(self) -> dict[str, Any]:
        """Leave a forked child that holds the connection open, as a library that forks late would."""
        kept = os.dup(link_of(self.client)._socket.fileno())
        pid = os.fork()
        if pid == 0:
            time.sleep(20)
            os._exit(0)
        os.close(kept)
        self.forked.append(pid)
        return {"pid": pid}

    def use_in_fork(self) -> dict[str, Any]:
        """What a forked child gets from its parent's client, and whether its copy of the socket is closed."""
        read_end, write_end = os.pipe()
        link = link_of(self.client)
        pid = os.fork()
        if pid == 0:
            try:
                self.client.ping()
                text = "no error"
            except KVFerryError as error:
                text = f"{type(error).__name__}: {error} fileno={link._socket.fileno()}"
            os.write(write_end, text.encode())
            os._exit(0)
        os.close(write_end)
        text = os.read(read_end, 4096).decode()
        os.close(read_end)
        os.waitpid(pid, 0)
        return {"text": text}

    def close(self) -> None:
        self.client.close()
