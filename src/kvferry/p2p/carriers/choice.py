"""Which carriers an engine offers to its peers."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from kvferry.cuda.device import device_uuid as uuid_of
from kvferry.cuda.memory import pointer_info
from kvferry.errors import CudaError, LayoutError, NcclError, ShareError, UnsupportedMemoryError
from kvferry.p2p.caches import KVCaches
from kvferry.p2p.carriers.host import HostCarrier
from kvferry.p2p.carriers.ipc.carrier import IpcCarrier
from kvferry.p2p.carriers.nccl.carrier import NcclCarrier
from kvferry.p2p.signal.handshake import HOST_CARRIER, IPC_CARRIER, NCCL_CARRIER

AUTO = "auto"


class Carriers(NamedTuple):
    """All that an engine has."""

    ipc: IpcCarrier
    nccl: NcclCarrier
    host: HostCarrier


class Offered(NamedTuple):
    """The best first. `why` says what keeps a better one from being offered; `device_uuid` is "" for the host."""

    carriers: tuple[str, ...]
    device_uuid: str = ""
    why: str = ""


def offered(wanted: str, made: Carriers, device: int | None, caches: KVCaches | None = None) -> Offered:
    """What can move tensors of a device, None for the host, and caches, out of what is `wanted`. In a caller's thread.

    Raises LayoutError where nothing can.
    """
    device_uuid = _uuid(device, caches)
    names, problems = [], []
    for name in (IPC_CARRIER, NCCL_CARRIER, HOST_CARRIER):
        if wanted in (AUTO, name):
            try:
                if _prepare(name, wanted, made, device_uuid=device_uuid, caches=caches):
                    names.append(name)
            except (ShareError, CudaError, NcclError) as error:
                problems.append(f"not {name}: {error}")
    if not names and caches is None and (wanted == IPC_CARRIER or not device_uuid):
        names = [IPC_CARRIER if wanted == IPC_CARRIER else HOST_CARRIER]  # until there are caches
    if not names:
        where = f"what is on GPU {device}" if caches is None else f"KV caches on {caches.device}"
        raise LayoutError(f"carrier {wanted} cannot move {where}: {'; '.join(problems)}")
    return Offered(tuple(names), device_uuid, "; ".join(problems))


def _prepare(name: str, wanted: str, made: Carriers, *, device_uuid: str, caches: KVCaches | None) -> bool:
    """Get one carrier ready; whether it is to be offered. Raises ShareError, CudaError, NcclError."""
    if name == IPC_CARRIER:
        if caches is None:
            return False
        made.ipc.export(caches)
        if device_uuid:
            with contextlib.suppress(ShareError, CudaError):  # said when a tensor is to be moved, and not before
                made.host.prepare(device_uuid)
        return True
    if name == NCCL_CARRIER:
        if device_uuid:
            made.nccl.prepare(device_uuid)
        elif caches is not None and wanted == name:
            raise UnsupportedMemoryError("the KV caches are in host memory, and NCCL moves that of GPUs")
        return bool(device_uuid)
    if device_uuid:
        made.host.prepare(device_uuid)
    return True


def _uuid(device: int | None, caches: KVCaches | None) -> str:
    """Of the GPU that all is on; "" for the host."""
    found = "" if device is None else uuid_of(device)
    if caches is None:
        return found
    lies_on = pointer_info(caches.storages[0].data_ptr()).device
    if device is not None and lies_on != device:
        where = f"GPU {lies_on}" if lies_on >= 0 else "the host"
        raise LayoutError(f"the KV caches are on {where}, and this engine is for GPU {device} (P2pConfig.device)")
    return uuid_of(lies_on) if lies_on >= 0 else ""
