"""NCCL's functions, typed, under their own names."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_void_p

from kvferry.p2p.nccl.calls import NcclCalls, version_text
from kvferry.p2p.nccl.functions import IN_PROGRESS, SUCCESS, UINT8, UNIQUE_ID_BYTES, ncclConfig, ncclUniqueId


class _CommCalls(NcclCalls):
    """Communicators are handles (ints). Of those that do not block, a call may return before it is carried out."""

    def ncclCommInitRank(self, num_ranks: int, unique_id: ncclUniqueId, rank: int) -> int:
        """Join, and block until all ranks have: for ever, where one never comes. `NcclLauncher` does not use it."""
        comm = c_void_p()
        self.call("ncclCommInitRank", byref(comm), num_ranks, unique_id, rank)
        return comm.value or 0

    def ncclCommInitRankConfig(self, num_ranks: int, unique_id: ncclUniqueId, rank: int, config: ncclConfig) -> int:
        """Begin to join; `ncclCommGetAsyncError` tells when it is done. The handle may be given to an abort at once."""
        comm = c_void_p()
        self._begun("ncclCommInitRankConfig", byref(comm), num_ranks, unique_id, rank, byref(config))
        return comm.value or 0

    def ncclCommGetAsyncError(self, comm: int) -> bool:
        """Whether the last call of the communicator is carried out; raises where it, or a transfer, failed."""
        state = c_int()
        self.call("ncclCommGetAsyncError", comm, byref(state))
        if state.value not in (SUCCESS, IN_PROGRESS):
            raise self.error("ncclCommGetAsyncError", state.value)
        return state.value == SUCCESS

    def ncclCommFinalize(self, comm: int) -> None:
        """Begin to end: what was launched is still carried out."""
        self._begun("ncclCommFinalize", comm)

    def ncclCommDestroy(self, comm: int) -> None:
        """Free a finalised communicator; blocks until the peer has ended its side, or its process."""
        self.call("ncclCommDestroy", comm)

    def ncclCommAbort(self, comm: int) -> None:
        """End what runs, and free the communicator; blocks (half a second on an H200 with a transfer under way)."""
        self.call("ncclCommAbort", comm)

    def ncclCommRegister(self, comm: int, address: int, nbytes: int) -> int:
        """Let transfers from and to that memory go without NCCL's own buffers; a handle."""
        handle = c_void_p()
        self.call("ncclCommRegister", comm, address, nbytes, byref(handle))
        return handle.value or 0

    def ncclCommDeregister(self, comm: int, handle: int) -> None:
        self.call("ncclCommDeregister", comm, handle)

    def _begun(self, name: str, *args: object) -> None:
        code = self.result(name, *args)
        if code not in (SUCCESS, IN_PROGRESS):
            raise self.error(name, code)


class NCCLLibrary(_CommCalls):
    """NCCL by ctypes: the library at `so_file`, or the one that `find_nccl_library` finds.

    Raises:
        NcclLibraryError: there is none, the file is no NCCL library, or it is older than 2.18.
    """

    def ncclGetVersion(self) -> str:
        """For example "2.28.9"."""
        return version_text(self.version)

    def ncclGetErrorString(self, code: int) -> str:
        text: bytes = self._functions["ncclGetErrorString"](code)
        return text.decode("utf-8", "replace")

    def ncclGetUniqueId(self) -> ncclUniqueId:
        """By which ranks meet. NCCL starts a thread that waits for them, without end if they never come."""
        unique_id = ncclUniqueId()
        self.call("ncclGetUniqueId", byref(unique_id))
        return unique_id

    def unique_id_from_bytes(self, data: bytes) -> ncclUniqueId:
        """The id that another process sent; ValueError unless it is 128 bytes."""
        if len(data) != UNIQUE_ID_BYTES:
            raise ValueError(f"a unique id has {UNIQUE_ID_BYTES} bytes, got {len(data)}")
        return ncclUniqueId.from_buffer_copy(data)

    def ncclGroupStart(self) -> None:
        self.call("ncclGroupStart")

    def ncclGroupEnd(self) -> None:
        """Launch what this thread has called since `ncclGroupStart`, or begin to."""
        self._begun("ncclGroupEnd")

    def ncclSend(self, address: int, nbytes: int, *, peer: int, comm: int, stream: int) -> None:
        """Send bytes of device memory, in stream order; the peer has to receive as many."""
        self._begun("ncclSend", address, nbytes, UINT8, peer, comm, stream)

    def ncclRecv(self, address: int, nbytes: int, *, peer: int, comm: int, stream: int) -> None:
        self._begun("ncclRecv", address, nbytes, UINT8, peer, comm, stream)

    def ncclMemAlloc(self, nbytes: int) -> int:
        """Memory of the current device, made such that registering it pays; its address."""
        address = c_void_p()
        self.call("ncclMemAlloc", byref(address), ctypes.c_size_t(nbytes))
        return address.value or 0

    def ncclMemFree(self, address: int) -> None:
        self.call("ncclMemFree", address)
