"""Which carriers an engine offers to its peers."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.errors import CudaError, LayoutError, ShareError
from kvferry.p2p.caches import KVCaches
from kvferry.p2p.carriers.ipc.carrier import IpcCarrier
from kvferry.p2p.signal.handshake import HOST_CARRIER, IPC_CARRIER

AUTO = "auto"


class Offered(NamedTuple):
    """The best first. `why` says what keeps a better one from being offered; `device_uuid` is "" for the host."""

    carriers: tuple[str, ...]
    device_uuid: str = ""
    why: str = ""


def offered(wanted: str, ipc: IpcCarrier, caches: KVCaches) -> Offered:
    """What can move these caches, out of what is `wanted`. In the caller's thread.

    Raises LayoutError where nothing can.
    """
    names, device_uuid, why = [], "", ""
    if wanted in (AUTO, IPC_CARRIER):
        try:
            device_uuid = ipc.export(caches).device_uuid
            names.append(IPC_CARRIER)
        except (ShareError, CudaError) as error:
            why = f"not ipc: {error}"
    if wanted in (AUTO, HOST_CARRIER) and caches.device.type == "cpu" and not device_uuid:
        names.append(HOST_CARRIER)
    if not names:
        why = why or "the host carrier moves host memory"
        raise LayoutError(f"carrier {wanted} cannot move KV caches on {caches.device}: {why}")
    return Offered(tuple(names), device_uuid, why)
