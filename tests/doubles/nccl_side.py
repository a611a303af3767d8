"""One rank in a process of its own, over the doubles or a GPU: the kind "nccl" of serving.zygote.

With `so_file`, the path of the double, `device` is the number of the host's GPU that the process sees; without, it uses
the real driver and NCCL, on that device.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import random
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from doubles.nccl_double import doubles
from kvferry.cuda.device import bound, visible_uuids
from kvferry.cuda.memory import memory_info, tensor_from_pointer
from kvferry.cuda.stream import Stream, synchronize_device
from kvferry.p2p.nccl import Communicator, NcclLauncher, NCCLLibrary, NcclSettings

if TYPE_CHECKING:
    from serving.process import Side

_ANSWER_S = 45.0


def join(first: Side, second: Side, *, within_s: float = 20.0) -> None:
    """Connect two sides, of which the first made the id, and is rank 0."""
    unique_id = first.call("unique_id")["unique_id"]
    uuids = [side.call("uuid")["uuid"] for side in (second, first)]
    for rank, side in enumerate((first, second)):
        side.ask("connect", unique_id=unique_id, rank=rank, peer_uuid=uuids[rank], within_s=within_s)
    for side in (first, second):
        side.answer()


def both(first: Side, second: Side, op: str, ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[Any, Any]:
    """The same command on both sides at the same time."""
    first.ask(op, **ours)
    second.ask(op, **theirs)
    return first.answer(), second.answer()


class NcclSide:
    """The operations; each gives a dict. Memory goes by a name, ranges are [name, offset, nbytes]."""

    def __init__(self, device: int, so_file: str | None = None, env: dict[str, str] | None = None) -> None:
        os.environ.update(env or {})
        self._stack = contextlib.ExitStack()
        if so_file is not None:
            self._stack.enter_context(doubles(Path(so_file), (device,)))
            device = 0  # the only one that a process over the doubles sees
        else:
            torch.cuda.set_device(device)
        self.library = NCCLLibrary(so_file)
        self.device = device
        self.launcher: NcclLauncher | None = None
        self.comm: Communicator | None = None
        self.memory: dict[str, tuple[int, int]] = {}
        self.last: Future[None] | None = None

    def uuid(self) -> Any:
        return {"uuid": visible_uuids()[self.device]}

    def launch(self, **settings: Any) -> Any:
        """Begin with these settings, before the first `connect`."""
        self.launcher = NcclLauncher(self.library, self.device, NcclSettings(**settings))
        return {"bytes_per_peer": self.launcher.settings.bytes_per_peer}

    def unique_id(self) -> Any:
        return {"unique_id": base64.b64encode(bytes(self.library.ncclGetUniqueId())).decode()}

    def connect(self, unique_id: str, rank: int, peer_uuid: str, within_s: float) -> Any:
        if self.launcher is None:
            self.launch()
        assert self.launcher is not None
        began = time.monotonic()
        connecting = self.launcher.connect(
            base64.b64decode(unique_id),
            rank,
            peer_device_uuid=peer_uuid,
            name=f"of rank {1 - rank}",
            timeout_s=within_s,
        )
        self.comm = connecting.result(_ANSWER_S)
        return {"seconds": time.monotonic() - began}

    def alloc(self, name: str, nbytes: int, seed: int | None = None) -> Any:
        """New memory, unless there is some of that name."""
        if name not in self.memory:
            with bound(self.device) as drv:
                self.memory[name] = (drv.mem_alloc(nbytes), nbytes)
        if seed is not None:
            self.fill(name, seed)
        return {"address": self.memory[name][0]}

    def alloc_registered(self, name: str, nbytes: int) -> Any:
        """Memory of NCCL's own allocator, registered with the communicator."""
        assert self.comm is not None
        with bound(self.device):
            address = self.library.ncclMemAlloc(nbytes)
        self.memory[name] = (address, nbytes)
        return {"handle": self.comm.register(address, nbytes).result(_ANSWER_S)}

    def unregister(self, handle: int) -> Any:
        assert self.comm is not None
        self.comm.unregister(handle).result(_ANSWER_S)
        return {}

    def fill(self, name: str, seed: int | None = None, value: int = 0) -> Any:
        """With random bytes, or with one value."""
        tensor = self._tensor(name)
        if seed is None:
            tensor.fill_(value)
        else:
            tensor.random_(0, 256, generator=torch.Generator(tensor.device).manual_seed(seed))
        self._synchronize(tensor)
        return {}

    def digest(self, name: str, offset: int = 0, nbytes: int | None = None) -> Any:
        tensor = self._tensor(name)[offset : None if nbytes is None else offset + nbytes]
        return {"digest": hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()}

    def peek(self, name: str, offset: int) -> Any:
        """One byte, also while an exchange writes there."""
        return {"byte": int(self._tensor(name)[offset])}

    def begin(self, sends: Any = (), receives: Any = (), count: int = 1, within_s: float = 40.0) -> Any:
        """Give an exchange to the launcher, so many times."""
        assert self.comm is not None
        ranges = [[self._range(*given) for given in side] for side in (sends, receives)]
        for _ in range(count):
            self.last = self.comm.exchange(sends=ranges[0], receives=ranges[1], timeout_s=within_s)
        return {}

    def finish(self) -> Any:
        """Wait for the last."""
        assert self.last is not None
        self.last.result(_ANSWER_S)
        return {}

    def running(self) -> Any:
        """Whether the last has ended, and how."""
        assert self.last is not None
        error = self.last.exception(0) if self.last.done() else None
        return {"done": self.last.done(), "error": None if error is None else type(error).__name__}

    def exchange(self, sends: Any = (), receives: Any = (), count: int = 1) -> Any:
        """Both; how long it took."""
        began = time.monotonic()
        self.begin(sends, receives, count)
        self.finish()
        return {"seconds": time.monotonic() - began}

    def random_sizes(self, name: str, count: int, seed: int, send: bool) -> Any:
        """So many exchanges of random sizes at random places of the memory; a digest over all bytes, in order."""
        assert self.comm is not None
        address, room = self.memory[name]
        tensor, chance, total = self._tensor(name), random.Random(seed), hashlib.sha256()
        for _ in range(count):
            nbytes = min(room, int(2 ** chance.uniform(0, room.bit_length())))
            at = chance.randrange(room - nbytes + 1)
            ranges = [(address + at, nbytes)]
            sides = {"sends": ranges} if send else {"receives": ranges}
            if not send:
                tensor[at : at + nbytes].zero_()
                self._synchronize(tensor)
            self.comm.exchange(**sides, timeout_s=30).result(_ANSWER_S)
            total.update(tensor[at : at + nbytes].cpu().numpy().tobytes())
        return {"digest": total.hexdigest()}

    def abort(self, reason: str) -> Any:
        assert self.comm is not None
        began = time.monotonic()
        self.comm.abort(reason).result(_ANSWER_S)
        return {"seconds": time.monotonic() - began}

    def close_communicator(self) -> Any:
        assert self.comm is not None
        self.comm.close().result(_ANSWER_S)
        return {}

    def compute(self, count: int) -> Any:
        """Fill the GPU with so many matrix products (a millisecond each on an H200), in a stream of their own."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            matrix = torch.ones(8192, 8192, dtype=torch.bfloat16, device=f"cuda:{self.device}")
            for _ in range(count):
                torch.mm(matrix, matrix)
        return {}

    def stream_works(self) -> Any:
        """Whether the GPU does something in a new stream, and in all."""
        with Stream(self.device) as stream:
            address, nbytes = self.memory[next(iter(self.memory))]
            stream.memset_async(address, 5, nbytes)
            stream.synchronize()
        synchronize_device(self.device)
        return {"works": True}

    def held(self) -> Any:
        """What this process has: threads, descriptors, GPU memory in use."""
        free, total = memory_info(self.device)
        return {
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "fds": len(os.listdir("/proc/self/fd")),
            "gpu_bytes": total - free,
            "communicators": 0 if self.launcher is None else self.launcher.num_communicators,
        }

    def close(self) -> None:
        if self.launcher is not None:
            self.launcher.close()
        self._stack.close()

    def _range(self, name: str, offset: int, nbytes: int) -> tuple[int, int]:
        return self.memory[name][0] + offset, nbytes

    def _tensor(self, name: str) -> torch.Tensor:
        address, nbytes = self.memory[name]
        with bound(self.device):
            return tensor_from_pointer(address, nbytes, device=self.device, owner=None)

    def _synchronize(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
