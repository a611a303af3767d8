"""The other process of `kvferry bench p2p`: an engine that sends, and the raw carriers' sending ends."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from kvferry import ipc
from kvferry.cuda.device import device_uuid
from kvferry.p2p import P2pConfig, P2pNcclEngine, Sending
from kvferry.p2p.nccl import NcclLauncher, NCCLLibrary, NcclSettings
from kvferry.reference.process import answer_lines
from kvferry.reference.worker import Command, Exit

__all__ = ["Early", "Init", "Keep", "Last", "Nccl", "Peer", "Register", "Shape", "Share", "Stream"]

BLOCK_TOKENS, HEAD_DIM = 16, 128
HEAD_BYTES = BLOCK_TOKENS * HEAD_DIM * 2  # of one head's keys, or values, of one block
WAIT_S = 60.0
FORMAT = "vllm_flash_attention"


class Shape(msgspec.Struct, frozen=True):
    """KV caches whose blocks lie in runs of `piece_bytes`: keys and values of each layer."""

    num_layers: int
    num_blocks: int
    piece_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return 2 * self.num_layers * self.piece_bytes

    def make(self, device: str) -> dict[str, torch.Tensor]:
        """The caches; all of block b is b % 251. On the host, in memory that can be mapped."""
        shape = (2, self.num_blocks, BLOCK_TOKENS, self.piece_bytes // HEAD_BYTES, HEAD_DIM)
        values = (torch.arange(self.num_blocks, device=device) % 251).to(torch.bfloat16)
        caches = {}
        for layer in range(self.num_layers):
            on_host = device == "cpu"
            cache = (
                ipc.allocate_shared(shape, torch.bfloat16)
                if on_host
                else torch.empty(shape, dtype=torch.bfloat16, device=device)
            )
            caches[f"layers.{layer}"] = cache.copy_(values.view(1, -1, 1, 1, 1).expand(shape))
        return caches


class Init(Command, frozen=True):
    """Make the engine. Replies its address, and the UUID of its GPU."""

    device: str
    carrier: str


class Register(Command, frozen=True):
    """Make and register KV caches."""

    shape: Shape


class Keep(Command, frozen=True):
    """Keep blocks until they are asked for; layer-wise: none is ready yet."""

    name: str
    ids: list[int]
    layer_wise: bool = False


class Early(Command, frozen=True):
    """All layers but the last are ready."""

    name: str


class Last(Command, frozen=True):
    """So is the last. Replies started_ns (monotonic)."""

    name: str


class Share(Command, frozen=True):
    """Send a tensor of so many bytes to the Unix socket at `path`, to be mapped."""

    path: str
    nbytes: int


class Stream(Command, frozen=True):
    """Send so many bytes over TCP, `repeats` times, each after a byte that asks for it."""

    port: int
    nbytes: int
    repeats: int


class Nccl(Command, frozen=True):
    """Join the communicator with this id as rank 1, and send so many bytes, `repeats` times."""

    unique_id: bytes
    peer_uuid: str
    nbytes: int
    repeats: int


class Peer:
    """The engine and what it sends."""

    def __init__(self) -> None:
        self._device = "cpu"
        self._engine: P2pNcclEngine | None = None
        self._shape = Shape(1, 1, HEAD_BYTES)
        self._sendings: dict[str, Sending] = {}
        self._shared: torch.Tensor | None = None
        self._handlers: dict[type[Command], Callable[[Any], dict[str, Any] | None]] = {
            Init: self._init,
            Register: self._register,
            Keep: self._keep,
            Early: self._early,
            Last: self._last,
            Share: self._share,
            Stream: self._stream,
            Nccl: self._nccl,
            Exit: lambda _: self.close(),
        }

    def handle(self, command: Command) -> dict[str, Any]:
        return self._handlers[type(command)](command) or {}

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _init(self, command: Init) -> dict[str, Any]:
        self._device = command.device
        if command.device != "cpu":
            torch.cuda.set_device(command.device)
        self._engine = P2pNcclEngine(P2pConfig(carrier=command.carrier, kv_buffer_size=1 << 20))
        return {"address": self._engine.address, "uuid": "" if self._device == "cpu" else device_uuid(self._number)}

    @property
    def _made(self) -> P2pNcclEngine:
        assert self._engine is not None
        return self._engine

    def _register(self, command: Register) -> None:
        self._shape = command.shape
        self._made.register_kv_caches(command.shape.make(self._device), format=FORMAT)

    def _keep(self, command: Keep) -> None:
        self._sendings = {name: sending for name, sending in self._sendings.items() if not sending.done()}
        self._sendings[command.name] = self._made.send_blocks(command.name, command.ids, layer_wise=command.layer_wise)

    def _early(self, command: Early) -> None:
        for layer in range(self._shape.num_layers - 1):
            self._sendings[command.name].layer_ready(layer)

    def _last(self, command: Last) -> dict[str, Any]:
        started = time.monotonic_ns()
        self._sendings[command.name].layer_ready(self._shape.num_layers - 1)
        return {"started_ns": started}

    def _share(self, command: Share) -> None:
        if self._device == "cpu":
            self._shared = ipc.allocate_shared((command.nbytes,), torch.uint8).fill_(1)
        else:
            self._shared = torch.ones(command.nbytes, dtype=torch.uint8, device=self._device)
            torch.cuda.synchronize(self._device)
        with socket.socket(socket.AF_UNIX) as sock, ipc.wrap(self._shared) as wrapper:
            sock.settimeout(30)
            sock.connect(command.path)
            ipc.send(sock, [wrapper])

    def _stream(self, command: Stream) -> None:
        data = memoryview(bytearray(command.nbytes))
        with socket.create_connection(("127.0.0.1", command.port), timeout=60) as sock:
            for _ in range(command.repeats):
                sock.recv(1)
                sock.sendall(data)

    def _nccl(self, command: Nccl) -> None:
        data = torch.ones(command.nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        launcher = NcclLauncher(NCCLLibrary(), self._number, NcclSettings())
        try:
            joining = launcher.connect(command.unique_id, 1, peer_device_uuid=command.peer_uuid, name="the receiver")
            comm = joining.result(WAIT_S)
            sends = [(data.data_ptr(), command.nbytes)]
            sent = [comm.exchange(sends=sends, timeout_s=WAIT_S) for _ in range(command.repeats)]
            for each in sent:
                each.result(WAIT_S)
        finally:
            launcher.close()

    @property
    def _number(self) -> int:
        """The GPU's number in this process."""
        return torch.device(self._device).index or 0


def main() -> None:
    peer = Peer()
    try:
        answer_lines(
            Init | Register | Keep | Early | Last | Share | Stream | Nccl | Exit,
            peer.handle,
            Exit,
        )
    finally:
        peer.close()


if __name__ == "__main__":
    main()
