"""Typed calls about work: devices and contexts, streams, events, kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from kvferry.cuda.calls import Library
from kvferry.cuda.functions import (
    NOT_READY,
    PEER_ACCESS_ALREADY_ENABLED,
    SOURCE_IN_STREAM_ORDER,
    STREAM_NON_BLOCKING,
    SUCCESS,
    WAIT_VALUE_GEQ,
    CopyAttributes,
    DeviceAttribute,
    IpcHandle,
    Uuid,
)


class DeviceCalls(Library):
    """Devices by ordinal, contexts by handle (an int, 0 for none)."""

    def device_count(self) -> int:
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value

    def device_uuid(self, ordinal: int) -> tuple[bytes, bool]:
        """The 16 bytes of the UUID, and whether it is a MIG instance's."""
        device = self._device(ordinal)
        uuid, physical = Uuid(), Uuid()
        self.call("cuDeviceGetUuid_v2", byref(uuid), device, device=ordinal)
        # The old function always gives the physical GPU's UUID, the new one the MIG instance's where there is one.
        mig = (
            self.has("cuDeviceGetUuid")
            and self.result("cuDeviceGetUuid", byref(physical), device) == SUCCESS
            and bytes(physical.data) != bytes(uuid.data)
        )
        return bytes(uuid.data), mig

    def device_attribute(self, attribute: DeviceAttribute, ordinal: int) -> int:
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), int(attribute), self._device(ordinal), device=ordinal)
        return value.value

    def retain_primary_context(self, ordinal: int) -> int:
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), self._device(ordinal), device=ordinal)
        return context.value or 0

    def primary_context_active(self, ordinal: int) -> bool:
        flags, active = c_uint(), c_int()
        self.call("cuDevicePrimaryCtxGetState", self._device(ordinal), byref(flags), byref(active), device=ordinal)
        return active.value != 0

    def push_context(self, context: int) -> None:
        self.call("cuCtxPushCurrent_v2", context)

    def pop_context(self) -> None:
        context = c_void_p()
        self.call("cuCtxPopCurrent_v2", byref(context))

    def current_context(self) -> int:
        context = c_void_p()
        self.call("cuCtxGetCurrent", byref(context))
        return context.value or 0

    def context_synchronize(self) -> None:
        """Block until all work given to the current context before is done."""
        self.call("cuCtxSynchronize")

    def enable_peer_access(self, context: int) -> None:
        """Let what runs in the current context reach the memory of another device's context. Idempotent."""
        code = self.result("cuCtxEnablePeerAccess", context, 0)
        if code not in (SUCCESS, PEER_ACCESS_ALREADY_ENABLED):
            raise self.error("cuCtxEnablePeerAccess", code)

    def _device(self, ordinal: int) -> int:
        device = c_int()
        self.call("cuDeviceGet", byref(device), ordinal, device=ordinal)
        return device.value


class StreamCalls(Library):
    """Streams and events are handles (ints; stream 0 is the default one). The owner's context has to be current."""

    def stream_create(self, priority: int = 0) -> int:
        stream = c_void_p()
        self.call("cuStreamCreateWithPriority", byref(stream), STREAM_NON_BLOCKING, priority)
        return stream.value or 0

    def stream_destroy(self, stream: int) -> None:
        self.call("cuStreamDestroy_v2", stream)

    def stream_synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", stream)

    def stream_query(self, stream: int) -> bool:
        """Whether all work in the stream is done."""
        return self._ready("cuStreamQuery", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self.call("cuStreamWaitEvent", stream, event, 0)

    def stream_write_value64(self, stream: int, address: int, value: int) -> None:
        self.call("cuStreamWriteValue64_v2", stream, address, value, 0)

    def stream_wait_value64(self, stream: int, address: int, value: int) -> None:
        """Hold the stream until the word at `address` is `value` or later (as 64-bit counters go round)."""
        self.call("cuStreamWaitValue64_v2", stream, address, value, WAIT_VALUE_GEQ)

    def memcpy_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.call("cuMemcpyAsync", dst, src, nbytes, stream)

    def memcpy_h2d_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.call("cuMemcpyHtoDAsync_v2", dst, src, nbytes, stream)

    @property
    def copies_batches(self) -> bool:
        """Whether `memcpy_batch_async` is there: from CUDA 12.8 on."""
        return self.has("cuMemcpyBatchAsync_v2") or self.has("cuMemcpyBatchAsync")

    def memcpy_batch_async(self, lists: tuple[int, int, int], count: int, stream: int) -> None:
        """Many copies as one piece of work, by the copy engine, in any order among themselves.

        `lists` are the addresses of three host arrays of `count` 64-bit words: targets, sources, bytes (never 0). They
        are read before this returns. `stream` is not the default stream.
        """
        attributes, first = CopyAttributes(SOURCE_IN_STREAM_ORDER), c_size_t(0)
        args = (*lists, count, byref(attributes), byref(first), 1)
        if self.has("cuMemcpyBatchAsync_v2"):
            self.call("cuMemcpyBatchAsync_v2", *args, stream)
        else:  # before CUDA 13 it also tells which copy is wrong, if one is
            self.call("cuMemcpyBatchAsync", *args, byref(c_size_t()), stream)

    def memset_async(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        self.call("cuMemsetD8Async", dst, value, nbytes, stream)

    def exchange_capture_mode(self, mode: int) -> int:
        """Set how the calling thread's calls get on with graphs that are being captured; the mode before."""
        place = c_int(mode)
        self.call("cuThreadExchangeStreamCaptureMode", byref(place))
        return place.value

    def event_create(self, flags: int) -> int:
        event = c_void_p()
        self.call("cuEventCreate", byref(event), flags)
        return event.value or 0

    def event_record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", event, stream)

    def event_query(self, event: int) -> bool:
        """Whether the work before the last record is done."""
        return self._ready("cuEventQuery", event)

    def event_synchronize(self, event: int) -> None:
        self.call("cuEventSynchronize", event)

    def event_destroy(self, event: int) -> None:
        self.call("cuEventDestroy_v2", event)

    def ipc_get_event_handle(self, event: int) -> bytes:
        handle = IpcHandle()
        self.call("cuIpcGetEventHandle", byref(handle), event)
        return bytes(handle.data)

    def ipc_open_event_handle(self, handle: bytes) -> int:
        event = c_void_p()
        self.call("cuIpcOpenEventHandle", byref(event), IpcHandle.from_buffer_copy(handle))
        return event.value or 0

    def _ready(self, name: str, handle: int) -> bool:
        code = self.result(name, handle)
        if code not in (SUCCESS, NOT_READY):
            raise self.error(name, code)
        return code == SUCCESS


class KernelCalls(Library):
    """Modules and functions are handles (ints), valid in the context in which the module was loaded."""

    def module_load(self, image: bytes) -> int:
        """Load PTX (a final zero byte is added) or a cubin."""
        module = c_void_p()
        self.call("cuModuleLoadData", byref(module), image)
        return module.value or 0

    def module_unload(self, module: int) -> None:
        self.call("cuModuleUnload", module)

    def module_function(self, module: int, name: str) -> int:
        function = c_void_p()
        self.call("cuModuleGetFunction", byref(function), module, name.encode())
        return function.value or 0

    def launch(
        self,
        function: int,
        args: Sequence[Any],
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        stream: int,
    ) -> None:
        """Launch with `args`, ctypes values of the kernel's parameter types in order."""
        places = (c_void_p * max(1, len(args)))(*(ctypes.addressof(arg) for arg in args))
        self.call("cuLaunchKernel", function, *grid, *block, 0, stream, places, None)
