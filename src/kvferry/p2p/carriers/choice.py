"""Which carriers an engine offers to its peers."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.cuda.device import device_uuid as uuid_of
from kvferry.cuda.memory import pointer_info
from kvferry.errors import CudaError, LayoutError, NcclError, ShareError, UnsupportedMemoryError
from kvferry.p2p.caches import KVCaches
from kvferry.p2p.carriers.ipc.carrier import IpcCarrier
from kvferry.p2p.carriers.nccl.carrier import NcclCarrier
from kvferry.p2p.signal.handshake import HOST_CARRIER, IPC_CARRIER, NCCL_CARRIER

AUTO = "auto"


class Offered(NamedTuple):
    """The best first. `why` says what keeps a better one from being offered; `device_uuid` is "" for the host."""

    carriers: tuple[str, ...]
    device_uuid: str = ""
    why: str = ""


def offered(wanted: str, ipc: IpcCarrier, nccl: NcclCarrier, caches: KVCaches) -> Offered:
    """What can move these caches, out of what is `wanted`. In the caller's thread.

    Raises LayoutError where nothing can.
    """
    names: list[str] = []
    device_uuid, why = "", ""
    if wanted in (AUTO, IPC_CARRIER):
        try:
            device_uuid = ipc.export(caches).device_uuid
            names.append(IPC_CARRIER)
        except (ShareError, CudaError) as error:
            why = f"not ipc: {error}"
    if wanted == NCCL_CARRIER or (wanted == AUTO and (device_uuid or caches.device.type == "cuda")):
        try:
            device_uuid = device_uuid or _gpu_of(caches)
            nccl.prepare(device_uuid)
            names.append(NCCL_CARRIER)
        except (NcclError, CudaError, UnsupportedMemoryError) as error:
            why = f"{why}; not nccl: {error}".removeprefix("; ")
    if wanted in (AUTO, HOST_CARRIER) and caches.device.type == "cpu" and not device_uuid:
        names.append(HOST_CARRIER)
    if not names:
        why = why or "the host carrier moves host memory"
        raise LayoutError(f"carrier {wanted} cannot move KV caches on {caches.device}: {why}")
    return Offered(tuple(names), device_uuid, why)


def _gpu_of(caches: KVCaches) -> str:
    device = pointer_info(caches.storages[0].data_ptr()).device
    if device < 0:
        raise UnsupportedMemoryError("the KV caches are in host memory, and NCCL moves that of GPUs")
    return uuid_of(device)
