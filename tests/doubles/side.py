"""One side of a share, run in a child process: allocates, fills, wraps, opens, reads, by JSON lines.

`python side.py FAKE VISIBLE SOCKET_FD`: over the driver double (FAKE is 1) or the real driver. A request is
`{"op": name, ...}`; the reply has the result, or `error` and `kind` where the operation raised. File descriptors go
over the Unix socket whose number is SOCKET_FD.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import hashlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from doubles.fake_cuda import FakeDriver
from doubles.vmm_pool import VmmPool
from kvferry.cuda.device import bound, visible_uuids
from kvferry.cuda.driver import driver, set_driver_for_testing
from kvferry.cuda.memory import HandleType, memory_info, tensor_from_pointer
from kvferry.cuda.stream import synchronize_device
from kvferry.ipc.raw import RawCudaIPCWrapper
from kvferry.ipc.table import process_table
from kvferry.ipc.torch_storage import CudaIPCWrapper
from kvferry.ipc.vmm import VmmCudaIPCWrapper
from kvferry.ipc.wrapper import DeviceIPCWrapper

WRAPPERS: dict[str, type[DeviceIPCWrapper]] = {
    "raw": RawCudaIPCWrapper,
    "vmm": VmmCudaIPCWrapper,
    "torch": CudaIPCWrapper,
}


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes that tell seeds and places apart."""
    return ((torch.arange(nbytes, dtype=torch.int64) * 31 + seed * 17) % 251).to(torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def pack(wrapper: DeviceIPCWrapper) -> str:
    return base64.b64encode(msgspec.msgpack.encode(wrapper.descriptor)).decode()


def unpack(kind: str, packed: str) -> DeviceIPCWrapper:
    cls = WRAPPERS[kind]
    descriptor = msgspec.msgpack.decode(base64.b64decode(packed), type=cls.descriptor_type)
    return cls.from_descriptor(descriptor)


def send_wrapper_fds(sock: socket.socket, wrapper: DeviceIPCWrapper) -> None:
    for start in range(0, wrapper.num_fds, 64):
        fds = [wrapper.export_fd(index) for index in range(start, min(start + 64, wrapper.num_fds))]
        socket.send_fds(sock, [b"f"], fds)
        for fd in fds:
            os.close(fd)
        assert sock.recv(1) == b"a"


def receive_wrapper_fds(sock: socket.socket, wrapper: DeviceIPCWrapper) -> None:
    done = 0
    while done < wrapper.num_fds:
        _, fds, _, _ = socket.recv_fds(sock, 1, 64)
        for fd in fds:
            wrapper.import_fd(done, fd)
            done += 1
        sock.send(b"a")


def in_fresh_thread(function: Callable[[], Any]) -> Any:
    """Run in a thread that has made no CUDA call."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(timeout=30)
    assert results, "the fresh thread failed"
    return results[0]


class Side:
    """The operations; each gives a dict."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.memory: dict[str, torch.Tensor] = {}
        self.raw: dict[str, tuple[int, int]] = {}
        self.pools: dict[str, VmmPool] = {}
        self.wrappers: dict[str, DeviceIPCWrapper] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def alloc(self, name: str, nbytes: int, device: int = 0, kind: str = "legacy", chunk: int = 2 << 20) -> Any:
        """Memory made by the driver (legacy), by cuMemCreate (vmm), or by torch."""
        if kind == "vmm":
            pool = self.pools[name] = VmmPool(nbytes, device=device, chunk_bytes=chunk, types=HandleType.POSIX_FD)
            self.memory[name] = pool.tensor()
        elif kind == "torch":
            self.memory[name] = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        else:
            with bound(device) as drv:
                address = drv.mem_alloc(nbytes)
            self.raw[name] = (address, device)
            self.memory[name] = tensor_from_pointer(address, nbytes, device=device, owner=None)
        return {"address": self.memory[name].data_ptr()}

    def free(self, name: str) -> Any:
        del self.memory[name]
        if name in self.raw:
            address, device = self.raw.pop(name)
            with bound(device) as drv:
                drv.mem_free(address)
        if name in self.pools:
            self.pools.pop(name).close()
        return {}

    def wrap(self, name: str, memory: str, start: int, dtype: str, shape: list[int], **how: Any) -> Any:
        """Fill a part of the memory and export it as a tensor of that dtype and shape.

        `how`: `wrapper` (its kind), `seed`, `thread` (export in a thread that has made no CUDA call).
        """
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        flat = self.memory[memory][start : start + size]
        flat.copy_(pattern(size, how.get("seed", 0)))
        if flat.is_cuda:
            synchronize_device(flat.get_device())
        tensor = flat.view(getattr(torch, dtype)).reshape(shape)
        kind = how.get("wrapper", "raw")
        make = partial(WRAPPERS[kind], tensor)
        made = self.wrappers[name] = in_fresh_thread(make) if how.get("thread") else make()
        return {"kind": kind, "packed": pack(made), "digest": digest(tensor), "fds": made.num_fds}

    def send_fds(self, name: str) -> Any:
        send_wrapper_fds(self.sock, self.wrappers[name])
        return {}

    def open(self, name: str, kind: str, packed: str) -> Any:
        """Import; file descriptors are read from the socket."""
        wrapper = self.wrappers[name] = unpack(kind, packed)
        receive_wrapper_fds(self.sock, wrapper)
        tensor = self.tensors[name] = wrapper.to_tensor()
        return {"digest": digest(tensor), "device": tensor.device.index, "dtype": str(tensor.dtype)}

    def read(self, name: str) -> Any:
        return {"digest": digest(self.tensors[name])}

    def write(self, name: str, seed: int) -> Any:
        flat = self.tensors[name].reshape(-1).view(torch.uint8)
        flat.copy_(pattern(flat.numel(), seed))
        if flat.is_cuda:
            synchronize_device(flat.get_device())
        return {}

    def forget(self, name: str) -> Any:
        """Close an exporting wrapper."""
        self.wrappers.pop(name).close()
        return {}

    def close(self, name: str) -> Any:
        """Close the wrapper, drop its tensor, wait until it is unmapped."""
        self.tensors.pop(name, None)
        self.wrappers.pop(name).close()
        gc.collect()
        process_table().mappings.drain(timeout_s=10)
        return {}

    def stats(self) -> Any:
        stats = process_table().mappings.stats()._asdict()
        return {**stats, "open_fds": len(os.listdir("/proc/self/fd"))}

    def share_cuda(self, memory: str) -> Any:
        """torch's own export of the memory's storage."""
        return {"fields": len(self.memory[memory].untyped_storage()._share_cuda_())}  # type: ignore[no-untyped-call]

    def free_bytes(self, device: int = 0) -> Any:
        return {"free": memory_info(device)[0]}

    def uuids(self) -> Any:
        return {"uuids": visible_uuids()}

    def token(self) -> Any:
        return {"token": process_table().token.hex()}

    def fork(self) -> Any:
        """What a forked child of this process sees of the table and of CUDA."""
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            seen: dict[str, Any] = {"token": process_table().token.hex(), "mapped": process_table().mappings.stats()[0]}
            try:
                for wrapper in self.wrappers.values():
                    wrapper.close()
                self.tensors.clear()
                driver()
            except Exception as error:  # noqa: BLE001 - the kind of error is what the test asks about
                seen["error"], seen["kind"] = str(error), type(error).__name__
            os.write(write_end, json.dumps(seen).encode())
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end) as reader:
            seen = json.loads(reader.read())
        os.waitpid(pid, 0)
        return seen


def main() -> None:
    fake, visible, fd = sys.argv[1] == "1", [int(v) for v in sys.argv[2].split(",")], int(sys.argv[3])
    if fake:
        set_driver_for_testing(FakeDriver(visible))
    side = Side(socket.socket(fileno=fd))
    for line in sys.stdin:
        request = json.loads(line)
        operation = getattr(side, request.pop("op"))
        try:
            reply = operation(**request)
        except Exception as error:  # noqa: BLE001 - sent to the test, which decides
            reply = {"error": str(error), "kind": type(error).__name__}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
