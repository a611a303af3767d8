"""KVferry: share, keep and move the paged KV caches of LLM engines.

Names are loaded on first use, so that importing the package costs little and needs neither a GPU nor a driver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvferry.client import CacheClient as CacheClient
    from kvferry.errors import BlockIdError as BlockIdError
    from kvferry.errors import ChunkCorruptError as ChunkCorruptError
    from kvferry.errors import ChunkMissingError as ChunkMissingError
    from kvferry.errors import CopyCancelled as CopyCancelled
    from kvferry.errors import CudaError as CudaError
    from kvferry.errors import CudaUnavailableError as CudaUnavailableError
    from kvferry.errors import DeadlineError as DeadlineError
    from kvferry.errors import KVFerryError as KVFerryError
    from kvferry.errors import LayoutError as LayoutError
    from kvferry.errors import MappingBoundsError as MappingBoundsError
    from kvferry.errors import NcclCallError as NcclCallError
    from kvferry.errors import NcclError as NcclError
    from kvferry.errors import NcclLibraryError as NcclLibraryError
    from kvferry.errors import NcclPeerError as NcclPeerError
    from kvferry.errors import NcclStuckError as NcclStuckError
    from kvferry.errors import NotContiguousError as NotContiguousError
    from kvferry.errors import PeerGoneError as PeerGoneError
    from kvferry.errors import PoolAddressError as PoolAddressError
    from kvferry.errors import PoolFullError as PoolFullError
    from kvferry.errors import ProtocolError as ProtocolError
    from kvferry.errors import RequestError as RequestError
    from kvferry.errors import SameDeviceError as SameDeviceError
    from kvferry.errors import ServerGoneError as ServerGoneError
    from kvferry.errors import ShareError as ShareError
    from kvferry.errors import StaleHandleError as StaleHandleError
    from kvferry.errors import TierError as TierError
    from kvferry.errors import TierFullError as TierFullError
    from kvferry.errors import TierUnavailableError as TierUnavailableError
    from kvferry.errors import TransferError as TransferError
    from kvferry.errors import UnknownDeviceError as UnknownDeviceError
    from kvferry.errors import UnsupportedMemoryError as UnsupportedMemoryError
    from kvferry.errors import WireError as WireError
    from kvferry.ipc import CudaIPCWrapper as CudaIPCWrapper
    from kvferry.ipc import DeviceIPCWrapper as DeviceIPCWrapper
    from kvferry.ipc import HostIPCWrapper as HostIPCWrapper
    from kvferry.ipc import IPCPolicy as IPCPolicy
    from kvferry.ipc import RawCudaIPCWrapper as RawCudaIPCWrapper
    from kvferry.ipc import VmmCudaIPCWrapper as VmmCudaIPCWrapper
    from kvferry.ipc import decode as decode
    from kvferry.ipc import encode as encode
    from kvferry.ipc import wrap as wrap
    from kvferry.layout import KVLayout as KVLayout
    from kvferry.p2p import P2pNcclEngine as P2pNcclEngine
    from kvferry.p2p.memory_pool import TensorMemoryPool as TensorMemoryPool
    from kvferry.p2p.nccl import NCCLLibrary as NCCLLibrary
    from kvferry.p2p.nccl import find_nccl_library as find_nccl_library
    from kvferry.server import CacheServer as CacheServer

_HOMES = {
    "kvferry.client": ("CacheClient",),
    "kvferry.errors": (
        "BlockIdError",
        "ChunkCorruptError",
        "ChunkMissingError",
        "CopyCancelled",
        "CudaError",
        "CudaUnavailableError",
        "DeadlineError",
        "KVFerryError",
        "LayoutError",
        "MappingBoundsError",
        "NcclCallError",
        "NcclError",
        "NcclLibraryError",
        "NcclPeerError",
        "NcclStuckError",
        "NotContiguousError",
        "PeerGoneError",
        "PoolAddressError",
        "PoolFullError",
        "ProtocolError",
        "RequestError",
        "SameDeviceError",
        "ServerGoneError",
        "ShareError",
        "StaleHandleError",
        "TierError",
        "TierFullError",
        "TierUnavailableError",
        "TransferError",
        "UnknownDeviceError",
        "UnsupportedMemoryError",
        "WireError",
    ),
    "kvferry.ipc": (
        "CudaIPCWrapper",
        "DeviceIPCWrapper",
        "HostIPCWrapper",
        "IPCPolicy",
        "RawCudaIPCWrapper",
        "VmmCudaIPCWrapper",
        "decode",
        "encode",
        "wrap",
    ),
    "kvferry.layout": ("KVLayout",),
    "kvferry.p2p.memory_pool": ("TensorMemoryPool",),
    "kvferry.p2p.nccl": ("NCCLLibrary", "find_nccl_library"),
    "kvferry.p2p": ("P2pNcclEngine",),
    "kvferry.server": ("CacheServer",),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'kvferry' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
