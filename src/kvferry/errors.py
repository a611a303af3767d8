"""Every error that KVferry raises.

KVFerryError
|-- ShareError                  memory cannot be shared with, or opened from, another process
|   |-- NotContiguousError      (ValueError) a tensor whose bytes are not one dense run
|   |-- UnsupportedMemoryError  (ValueError) this wrapper cannot express this kind of memory
|   |-- UnknownDeviceError      the peer's GPU is not visible here
|   |-- StaleHandleError        the exporter freed, or freed and re-made, the allocation
|   `-- MappingBoundsError      (ValueError) a tensor would lie beyond the memory that was opened
|-- WireError                   (ValueError) bytes from a peer that do not decode; nothing was opened
|-- CudaError                   a driver call failed; names call, code and device
|   `-- CudaUnavailableError    no driver, no device, or a forked child that may not use CUDA
|-- LayoutError                 (ValueError) tensors or settings that describe no known KV layout
|-- BlockIdError                (ValueError) block ids outside the registered cache, or too few
|-- CopyCancelled               a copy stopped early because it was asked to
|-- DeadlineError               (TimeoutError) a wait ended without what it waited for
|-- ProtocolError               a peer broke the protocol; the session ends
|-- TierError                   a lower tier (disk, remote) failed one chunk
|   |-- ChunkMissingError       it does not have the chunk (any more)
|   |-- ChunkCorruptError       what it has is torn, damaged, or another chunk
|   |-- TierFullError           it has no room
|   `-- TierUnavailableError    it cannot be reached, or did not answer in time
|-- NcclError                   NCCL, or a communicator of it, failed
|   |-- NcclLibraryError        no usable NCCL library, or one without a function that is needed
|   |-- NcclCallError           a call failed; names call, code and what NCCL says of it
|   |-- SameDeviceError         two ranks on one GPU, which NCCL does not join
|   `-- NcclPeerError           two ranks were not joined in time, or one of them was lost
|       `-- NcclStuckError      and aborting did not end either: the memory may still be written to
|-- PoolFullError               a pool of pinned memory has no free block that is large enough
|-- PoolAddressError            (ValueError) an address that the pool did not give out, or took back already
|-- RequestError                the server refused one request; `code` says why, the session goes on
|-- TransferError               KV did not get from engine to engine; `code` says why
|   `-- PeerGoneError           (ConnectionError) the other engine is gone, or cannot be reached
`-- ServerGoneError             (ConnectionError) no server, or it went away
"""

from __future__ import annotations


class KVFerryError(Exception):
    """The root of the tree."""


class ShareError(KVFerryError):
    """Memory cannot be shared with, or opened from, another process."""


class NotContiguousError(ShareError, ValueError):
    """The tensor's bytes are not one dense run, and permuting its axes does not make them one."""


class UnsupportedMemoryError(ShareError, ValueError):
    """The wrapper cannot express this kind of memory; the text says which allocator made it and what to use."""


class UnknownDeviceError(ShareError):
    """The GPU on which the peer's memory lives is not visible in this process."""


class StaleHandleError(ShareError):
    """The handle belongs to an allocation that its exporter has freed, or freed and made again."""


class MappingBoundsError(ShareError, ValueError):
    """A descriptor names bytes beyond the end of the memory that was opened."""


class WireError(KVFerryError, ValueError):
    """Bytes from a peer are malformed, truncated, oversized or of an unknown version; nothing was opened."""


class CudaError(KVFerryError):
    """A CUDA driver or NVRTC call failed.

    `call` is the function's name, `code` the numeric CUresult, `device` the ordinal where one is known.
    """

    def __init__(self, call: str, code: int, text: str, device: int | None = None) -> None:
        where = "" if device is None else f" on device {device}"
        super().__init__(f"{call} failed{where}: {text} (code {code})")
        self.call = call
        self.code = code
        self.device = device


class CudaUnavailableError(CudaError):
    """There is no usable CUDA here: no driver, no device, or a child forked after CUDA was in use."""

    def __init__(self, reason: str) -> None:
        super().__init__("cuInit", 100, reason)


class LayoutError(KVFerryError, ValueError):
    """Tensors, or settings beside them, that describe no KV layout known here."""


class BlockIdError(KVFerryError, ValueError):
    """Block ids lie outside the registered cache, or do not cover the tokens asked for."""


class CopyCancelled(KVFerryError):
    """A copy stopped early because it was asked to; nothing of it is still in flight."""


class DeadlineError(KVFerryError, TimeoutError):
    """A wait ended without what it waited for."""


class ProtocolError(KVFerryError):
    """A peer sent what the protocol does not allow; its session ends."""


class TierError(KVFerryError):
    """A lower tier of the cache failed to keep, or to give back, one chunk."""


class ChunkMissingError(TierError):
    """The tier does not have the chunk, or not any more."""


class ChunkCorruptError(TierError):
    """What the tier has under the chunk's name is torn, damaged, or another chunk."""


class TierFullError(TierError):
    """The tier has no room for the chunk."""


class TierUnavailableError(TierError):
    """The tier cannot be reached or used at present, or did not answer in time."""


class NcclError(KVFerryError):
    """NCCL, or a communicator of it, failed."""


class NcclLibraryError(NcclError):
    """No NCCL library can be used; the text lists what was tried. Or it has no such function: a newer one is needed."""


class NcclCallError(NcclError):
    """An NCCL call failed. `call` is the function's name, `code` the numeric ncclResult_t."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} failed: {text} (code {code})")
        self.call = call
        self.code = code


class SameDeviceError(NcclError):
    """Both ranks would be on one GPU, which NCCL does not join: share the memory by IPC instead."""


class NcclPeerError(NcclError):
    """Two ranks were not joined in time, or one was lost. What was received is not to be used; no more of it comes."""


class NcclStuckError(NcclPeerError):
    """The peer was lost, and aborting did not end in time: the GPU may still read and write the transfer's memory."""


class PoolFullError(KVFerryError):
    """A pool of pinned memory has no free block that is large enough."""


class PoolAddressError(KVFerryError, ValueError):
    """An address that the pool did not give out, or took back already. Nothing was changed."""


class RequestError(KVFerryError):
    """The server refused one request; the session goes on. `code` is stable, the text is for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{text} [{code}]")
        self.code = code


class TransferError(KVFerryError):
    """KV did not get from one engine to another, or not all of it. `code` is stable, `text` is for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{text} [{code}]")
        self.code = code
        self.text = text


class PeerGoneError(TransferError, ConnectionError):
    """The other engine is gone, cannot be reached, or does not want this one."""


class ServerGoneError(KVFerryError, ConnectionError):
    """There is no server at that address, or it went away."""
