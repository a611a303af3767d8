"""What is called in NCCL, as data: one row a function, and the structures and numbers of the C interface."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from types import MappingProxyType
from typing import Any, NamedTuple

UNIQUE_ID_BYTES = 128

# ncclResult_t, those that mean something here; every other one is an error and nothing more.
SUCCESS = 0
SYSTEM_ERROR = 2
IN_PROGRESS = 7

UINT8 = 1  # ncclDataType_t: all data goes as bytes

# The version that the configuration below declares. Newer libraries take a structure of an older version, and use
# their own defaults for what it lacks, so one layout serves all of them.
CONFIG_VERSION = 21800
_CONFIG_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT


class ncclUniqueId(ctypes.Structure):
    """128 opaque bytes by which two ranks meet; they hold the address of who made them. Passed by value."""

    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)

    def __bytes__(self) -> bytes:
        return bytes(self.internal)


class ncclConfig(ctypes.Structure):
    """ncclConfig_t as NCCL 2.18 has it."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
    )

    @classmethod
    def non_blocking(cls, max_ctas: int) -> ncclConfig:
        """Calls return before they are carried out; a transfer takes at most `max_ctas` blocks of threads."""
        return cls(
            size=ctypes.sizeof(cls),
            magic=_CONFIG_MAGIC,
            version=CONFIG_VERSION,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=max_ctas,
            net_name=None,
            split_share=_UNDEFINED,
        )


class Function(NamedTuple):
    """One exported function. `since` is the release that brought it, where it is one that may be missing."""

    restype: Any
    argtypes: tuple[Any, ...]
    since: str = ""


_COMM = c_void_p  # ncclComm_t
_STREAM = c_void_p  # cudaStream_t, which is a CUstream
_TRANSFER = Function(c_int, (c_void_p, c_size_t, c_int, c_int, _COMM, _STREAM))

FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        "ncclGetVersion": Function(c_int, (POINTER(c_int),)),
        "ncclGetErrorString": Function(c_char_p, (c_int,)),
        "ncclGetLastError": Function(c_char_p, (_COMM,)),
        "ncclGetUniqueId": Function(c_int, (POINTER(ncclUniqueId),)),
        "ncclCommInitRank": Function(c_int, (POINTER(_COMM), c_int, ncclUniqueId, c_int)),
        "ncclCommInitRankConfig": Function(c_int, (POINTER(_COMM), c_int, ncclUniqueId, c_int, POINTER(ncclConfig))),
        "ncclCommGetAsyncError": Function(c_int, (_COMM, POINTER(c_int))),
        "ncclCommFinalize": Function(c_int, (_COMM,)),
        "ncclCommDestroy": Function(c_int, (_COMM,)),
        "ncclCommAbort": Function(c_int, (_COMM,)),
        "ncclGroupStart": Function(c_int, ()),
        "ncclGroupEnd": Function(c_int, ()),
        "ncclSend": _TRANSFER,
        "ncclRecv": _TRANSFER,
        "ncclCommRegister": Function(c_int, (_COMM, c_void_p, c_size_t, POINTER(c_void_p)), since="2.19"),
        "ncclCommDeregister": Function(c_int, (_COMM, c_void_p), since="2.19"),
        "ncclMemAlloc": Function(c_int, (POINTER(c_void_p), c_size_t), since="2.19"),
        "ncclMemFree": Function(c_int, (c_void_p,), since="2.19"),
    }
)
