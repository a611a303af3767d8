"""What is called in libcuda, as data: one row a function, and the structures and numbers of the C interface."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from types import MappingProxyType
from typing import Any

HANDLE_BYTES = 64

# Return codes that mean something here; every other one is an error and nothing more.
SUCCESS = 0
ALREADY_MAPPED = 208
NOT_FOUND = 500
NOT_READY = 600
PEER_ACCESS_ALREADY_ENABLED = 704

IPC_LAZY_PEER_ACCESS = 1
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_DEVICEMAP = 2
STREAM_NON_BLOCKING = 1
WAIT_VALUE_GEQ = 0
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
EVENT_INTERPROCESS = 4

CAPTURE_RELAXED = 2

ALLOCATION_PINNED = 1
LOCATION_DEVICE = 1
SOURCE_IN_STREAM_ORDER = 1
ACCESS_READ_WRITE = 3
GRANULARITY_MINIMUM = 0

MEMORY_TYPE_HOST = 1


class HandleType(enum.IntFlag):
    """How a VMM allocation may be given to another process (CUmemAllocationHandleType)."""

    NONE = 0
    POSIX_FD = 1
    FABRIC = 8


class PointerAttribute(enum.IntEnum):
    """CUpointer_attribute, those that are asked for."""

    MEMORY_TYPE = 2
    BUFFER_ID = 7
    IS_MANAGED = 8
    DEVICE_ORDINAL = 9
    LEGACY_IPC_CAPABLE = 10
    RANGE_START = 11
    RANGE_SIZE = 12
    ALLOWED_HANDLE_TYPES = 14
    MEMPOOL_HANDLE = 17


class DeviceAttribute(enum.IntEnum):
    """CUdevice_attribute, those that are asked for."""

    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("data", ctypes.c_ubyte * 16),)


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, CUipcEventHandle and CUmemFabricHandle: 64 opaque bytes, passed by value."""

    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    """The flags inside CUmemAllocationProp."""

    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_metadata", c_void_p),
        ("flags", AllocationFlags),
    )


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("source_access_order", c_int), ("source", Location), ("target", Location), ("flags", c_uint))


class AccessDescriptor(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


_DEVICEPTR = c_uint64  # CUdeviceptr
_BATCH = (c_void_p, c_void_p, c_void_p, c_size_t, POINTER(CopyAttributes), POINTER(c_size_t), c_size_t)
_HANDLE = c_void_p  # CUcontext, CUstream, CUevent, CUmodule, CUfunction
_ALLOCATION = c_uint64  # CUmemGenericAllocationHandle

# Name -> argument types. Every function returns a CUresult, which is an int.
FUNCTIONS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "cuInit": (c_uint,),
        "cuGetErrorName": (c_int, POINTER(c_char_p)),
        "cuGetErrorString": (c_int, POINTER(c_char_p)),
        "cuDeviceGetCount": (POINTER(c_int),),
        "cuDeviceGet": (POINTER(c_int), c_int),
        "cuDeviceGetUuid": (POINTER(Uuid), c_int),
        "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
        "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
        "cuDevicePrimaryCtxRetain": (POINTER(_HANDLE), c_int),
        "cuDevicePrimaryCtxGetState": (c_int, POINTER(c_uint), POINTER(c_int)),
        "cuCtxPushCurrent_v2": (_HANDLE,),
        "cuCtxPopCurrent_v2": (POINTER(_HANDLE),),
        "cuCtxGetCurrent": (POINTER(_HANDLE),),
        "cuCtxSynchronize": (),
        "cuCtxEnablePeerAccess": (_HANDLE, c_uint),
        "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
        "cuMemAlloc_v2": (POINTER(_DEVICEPTR), c_size_t),
        "cuMemFree_v2": (_DEVICEPTR,),
        "cuMemAllocManaged": (POINTER(_DEVICEPTR), c_size_t, c_uint),
        "cuMemGetAddressRange_v2": (POINTER(_DEVICEPTR), POINTER(c_size_t), _DEVICEPTR),
        "cuPointerGetAttributes": (c_uint, POINTER(c_int), POINTER(c_void_p), _DEVICEPTR),
        "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
        "cuMemHostUnregister": (c_void_p,),
        "cuMemHostGetDevicePointer_v2": (POINTER(_DEVICEPTR), c_void_p, c_uint),
        "cuMemcpyAsync": (_DEVICEPTR, _DEVICEPTR, c_size_t, _HANDLE),
        "cuMemcpyHtoDAsync_v2": (_DEVICEPTR, c_void_p, c_size_t, _HANDLE),
        "cuMemcpyBatchAsync": (*_BATCH, POINTER(c_size_t), _HANDLE),
        "cuMemcpyBatchAsync_v2": (*_BATCH, _HANDLE),
        "cuMemsetD8Async": (_DEVICEPTR, ctypes.c_ubyte, c_size_t, _HANDLE),
        "cuIpcGetMemHandle": (POINTER(IpcHandle), _DEVICEPTR),
        "cuIpcOpenMemHandle_v2": (POINTER(_DEVICEPTR), IpcHandle, c_uint),
        "cuIpcCloseMemHandle": (_DEVICEPTR,),
        "cuIpcGetEventHandle": (POINTER(IpcHandle), _HANDLE),
        "cuIpcOpenEventHandle": (POINTER(_HANDLE), IpcHandle),
        "cuMemCreate": (POINTER(_ALLOCATION), c_size_t, POINTER(AllocationProperties), c_uint64),
        "cuMemRelease": (_ALLOCATION,),
        "cuMemRetainAllocationHandle": (POINTER(_ALLOCATION), c_void_p),
        "cuMemExportToShareableHandle": (c_void_p, _ALLOCATION, c_int, c_uint64),
        "cuMemImportFromShareableHandle": (POINTER(_ALLOCATION), c_void_p, c_int),
        "cuMemGetAllocationPropertiesFromHandle": (POINTER(AllocationProperties), _ALLOCATION),
        "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
        "cuMemAddressReserve": (POINTER(_DEVICEPTR), c_size_t, c_size_t, _DEVICEPTR, c_uint64),
        "cuMemAddressFree": (_DEVICEPTR, c_size_t),
        "cuMemMap": (_DEVICEPTR, c_size_t, c_size_t, _ALLOCATION, c_uint64),
        "cuMemUnmap": (_DEVICEPTR, c_size_t),
        "cuMemSetAccess": (_DEVICEPTR, c_size_t, POINTER(AccessDescriptor), c_size_t),
        "cuStreamCreateWithPriority": (POINTER(_HANDLE), c_uint, c_int),
        "cuStreamDestroy_v2": (_HANDLE,),
        "cuStreamSynchronize": (_HANDLE,),
        "cuStreamQuery": (_HANDLE,),
        "cuStreamWaitEvent": (_HANDLE, _HANDLE, c_uint),
        "cuStreamWriteValue64_v2": (_HANDLE, _DEVICEPTR, c_uint64, c_uint),
        "cuStreamWaitValue64_v2": (_HANDLE, _DEVICEPTR, c_uint64, c_uint),
        "cuEventCreate": (POINTER(_HANDLE), c_uint),
        "cuEventRecord": (_HANDLE, _HANDLE),
        "cuEventQuery": (_HANDLE,),
        "cuEventSynchronize": (_HANDLE,),
        "cuEventDestroy_v2": (_HANDLE,),
        "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
        "cuModuleLoadData": (POINTER(_HANDLE), c_char_p),
        "cuModuleUnload": (_HANDLE,),
        "cuModuleGetFunction": (POINTER(_HANDLE), _HANDLE, c_char_p),
        "cuLaunchKernel": (_HANDLE, *((c_uint,) * 7), _HANDLE, POINTER(c_void_p), POINTER(c_void_p)),
    }
)
