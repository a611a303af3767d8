"""Ranks in this process, for the tests of communicators over the doubles."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from doubles.fake_cuda import FakeDriver
from doubles.nccl_double import NcclDouble, doubles, memory
from kvferry.cuda.device import device_uuid
from kvferry.p2p.nccl import Communicator, NcclLauncher, NCCLLibrary, NcclSettings

WAIT_S = 20.0


class Ranks:
    """A launcher on each GPU of the double."""

    def __init__(self, so_file: Path, parts: tuple[FakeDriver, NcclDouble], count: int, settings: NcclSettings) -> None:
        self.driver, self.double = parts
        self.library = NCCLLibrary(str(so_file))
        self.launchers = [NcclLauncher(self.library, device, settings) for device in range(count)]

    def begin(self, rank: int, unique_id: bytes, *, at: int, peer: int, timeout_s: float = 10) -> Future[Communicator]:
        uuid = device_uuid(peer)
        return self.launchers[at].connect(
            unique_id, rank, peer_device_uuid=uuid, name=f"peer {peer}", timeout_s=timeout_s
        )

    def unique_id(self) -> bytes:
        return bytes(self.library.ncclGetUniqueId())

    def pair(self, sender: int = 0, receiver: int = 1) -> tuple[Communicator, Communicator]:
        unique_id = self.unique_id()
        first = self.begin(0, unique_id, at=sender, peer=receiver)
        second = self.begin(1, unique_id, at=receiver, peer=sender)
        return first.result(WAIT_S), second.result(WAIT_S)


@contextlib.contextmanager
def ranks(so_file: Path, count: int = 2, settings: NcclSettings | None = None) -> Iterator[Ranks]:
    """Launchers on so many GPUs, closed at the end."""
    with doubles(so_file, tuple(range(count))) as parts, contextlib.ExitStack() as stack:
        made = Ranks(so_file, parts, count, settings or NcclSettings(end_timeout_s=5))
        for launcher in made.launchers:
            stack.callback(launcher.close)
        yield made


def check_moves(sender: Communicator, receiver: Communicator) -> None:
    """What GPU 0 sends comes to GPU 1."""
    source, target = Memory(0, 1000, random=True), Memory(1, 1000)
    received = receiver.exchange(receives=[target.range], timeout_s=10)
    sender.exchange(sends=[source.range], timeout_s=10).result(WAIT_S)
    received.result(WAIT_S)
    assert target.read() == source.read()


class Memory:
    """Memory of one GPU of the double, which the test can look into."""

    def __init__(self, device: int, nbytes: int, *, random: bool = False) -> None:
        self.address = memory(device, nbytes)
        self.nbytes = nbytes
        if random:
            self.write(os.urandom(nbytes))

    @property
    def range(self) -> tuple[int, int]:
        return self.address, self.nbytes

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes)

    def write(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, len(data))
