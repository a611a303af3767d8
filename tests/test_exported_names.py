"""The public names are pinned: adding or removing one is a decision, made here."""

from __future__ import annotations

import subprocess
import sys

import kvferry

NAMES = [
    "BlockIdError",
    "CacheClient",
    "CacheServer",
    "ChunkCorruptError",
    "ChunkMissingError",
    "CopyCancelled",
    "CudaError",
    "CudaIPCWrapper",
    "CudaUnavailableError",
    "DeadlineError",
    "DeviceIPCWrapper",
    "HostIPCWrapper",
    "IPCPolicy",
    "KVFerryError",
    "KVLayout",
    "LayoutError",
    "MappingBoundsError",
    "NCCLLibrary",
    "NcclCallError",
    "NcclError",
    "NcclLibraryError",
    "NcclPeerError",
    "NcclStuckError",
    "NotContiguousError",
    "P2pNcclEngine",
    "PeerGoneError",
    "PoolAddressError",
    "PoolFullError",
    "ProtocolError",
    "RawCudaIPCWrapper",
    "RequestError",
    "SameDeviceError",
    "ServerGoneError",
    "ShareError",
    "StaleHandleError",
    "TensorMemoryPool",
    "TierError",
    "TierFullError",
    "TierUnavailableError",
    "TransferError",
    "UnknownDeviceError",
    "UnsupportedMemoryError",
    "VmmCudaIPCWrapper",
    "WireError",
    "decode",
    "encode",
    "find_nccl_library",
    "wrap",
]


def test_names_are_these() -> None:
    assert kvferry.__all__ == NAMES


def test_every_name_loads() -> None:
    for name in NAMES:
        assert getattr(kvferry, name).__name__ == name


def test_errors_share_one_root() -> None:
    errors = [getattr(kvferry, name) for name in NAMES if name.endswith(("Error", "Cancelled"))]
    assert all(issubclass(error, kvferry.KVFerryError) for error in errors)


def test_import_is_lazy() -> None:
    """Importing the package loads neither torch nor any part: U1 asks that it also works with no torch at all."""
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import kvferry\n"
        "assert kvferry.WireError\n"
        "parts = [m for m in sys.modules if m.startswith('kvferry.')]\n"
        "assert parts == ['kvferry.errors'], parts\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
