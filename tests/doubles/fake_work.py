"""The double's streams, events and kernels: each stream is a thread that runs its work in order."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from doubles.fake_base import INVALID_VALUE, Refused, put
from doubles.fake_memory import INVALID_HANDLE, NOT_FOUND, map_fd, new_memfd, open_handle, pack_handle
from doubles.fake_vmm import FakeVmm

NOT_READY = 600
_POLL_S = 0.0005

# What a launch runs in stream order, made from the addresses of the arguments when the launch is made.
Kernel = Callable[[list[int]], Callable[[], None]]


def _discard(function: Callable[..., object], *args: int) -> None:
    function(*args)


class FakeStream:
    """Work in order, on a thread of its own that ends when the stream is destroyed."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._work: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self.stopped = False
        threading.Thread(target=self._run, name="fake-stream", daemon=True).start()

    def push(self, step: Callable[[], None]) -> None:
        with self._changed:
            self._work.append(step)
            self._changed.notify_all()

    def idle(self) -> bool:
        with self._changed:
            return not self._work and not self._busy

    def wait_idle(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._work and not self._busy, timeout=50):
                raise TimeoutError("a stream of the double did not become idle")

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def hold_until(self, reached: Callable[[], bool]) -> None:
        """Keep the stream's thread here until then; for use inside a step."""
        while not reached() and not self.stopped:
            time.sleep(_POLL_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._work and not self.stopped:
                    self._changed.wait(timeout=1.0)
                if not self._work:
                    return
                step = self._work.popleft()
                self._busy = True
            try:
                step()
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()


class FakeEvent:
    """Two counters, how often recorded and how far reached, in a page that another process can map."""

    def __init__(self, flags: int, fd: int | None = None) -> None:
        self.flags = flags
        self.fd = new_memfd(mmap.PAGESIZE) if fd is None else fd
        self._mapping, address = map_fd(self.fd, mmap.PAGESIZE)
        self._words = (ctypes.c_uint64 * 2).from_address(address)

    def record(self, stream: FakeStream) -> None:
        self._words[0] += 1
        number = self._words[0]

        def reach() -> None:
            self._words[1] = max(self._words[1], number)

        stream.push(reach)

    def reached(self, number: int | None = None) -> bool:
        return self._words[1] >= (self._words[0] if number is None else number)

    @property
    def recorded(self) -> int:
        return int(self._words[0])

    def close(self) -> None:
        # The page stays mapped: a step that is still in a stream may write to it.
        os.close(self.fd)


class FakeWork(FakeVmm):
    """Streams, events, copies, values in memory, kernels."""

    def __init__(self, visible: Any, mig: bool) -> None:
        super().__init__(visible, mig)
        self.kernels: dict[str, Kernel] = {}
        self._names: dict[int, str] = {}
        self._streams: dict[int, FakeStream] = {}
        self._destroyed: list[FakeStream] = []  # their work still runs, as the real driver's does
        self._defaults: dict[int, FakeStream] = {}
        self._events: dict[int, FakeEvent] = {}
        self._handles = itertools.count(0x5000)
        self.capture_mode = threading.local()

    def stream(self, handle: int | None) -> FakeStream:
        device = self.device()
        with self.lock:
            if not handle:
                if device not in self._defaults:
                    self._defaults[device] = FakeStream(device)
                return self._defaults[device]
            if handle not in self._streams:
                raise Refused(INVALID_HANDLE)
            return self._streams[handle]

    def stream_of_any_device(self, handle: int) -> FakeStream:
        """For other libraries' doubles, whose threads have no context of this one."""
        with self.lock:
            return self._streams[handle]

    def _event(self, handle: int) -> FakeEvent:
        self.device()
        if handle not in self._events:
            raise Refused(INVALID_HANDLE)
        return self._events[handle]

    def stop(self) -> None:
        for stream in (*self._streams.values(), *self._defaults.values()):
            stream.stop()

    def do_cuCtxSynchronize(self) -> None:
        device = self.device()
        with self.lock:
            streams = [*self._streams.values(), *self._defaults.values(), *self._destroyed]
        for stream in streams:
            if stream.device == device:
                stream.wait_idle()

    def do_cuMemFree_v2(self, address: int) -> None:
        """Waits for the device first, as the real one does: no work in flight meets memory that is gone."""
        self.do_cuCtxSynchronize()
        super().do_cuMemFree_v2(address)

    def do_cuStreamCreateWithPriority(self, place: Any, flags: int, priority: int) -> None:
        del flags, priority
        handle = next(self._handles)
        self._streams[handle] = FakeStream(self.device())
        put(place, handle)

    def do_cuStreamDestroy_v2(self, handle: int) -> None:
        stream = self.stream(handle)
        stream.stop()
        with self.lock:
            del self._streams[handle]
            self._destroyed = [gone for gone in self._destroyed if not gone.idle()] + [stream]

    def do_cuStreamSynchronize(self, handle: int) -> None:
        self.stream(handle).wait_idle()

    def do_cuThreadExchangeStreamCaptureMode(self, place: Any) -> None:
        self.device()
        before = getattr(self.capture_mode, "value", 0)
        self.capture_mode.value = place._obj.value
        put(place, before)

    def do_cuStreamQuery(self, handle: int) -> None:
        if not self.stream(handle).idle():
            raise Refused(NOT_READY)

    def do_cuStreamWaitEvent(self, handle: int, event: int, flags: int) -> None:
        del flags
        stream, awaited = self.stream(handle), self._event(event)
        number = awaited.recorded
        stream.push(lambda: stream.hold_until(lambda: awaited.reached(number)))

    def do_cuStreamWriteValue64_v2(self, handle: int, address: int, value: int, flags: int) -> None:
        del flags
        word = self._word(address)
        self.stream(handle).push(lambda: setattr(word, "value", value))

    def do_cuStreamWaitValue64_v2(self, handle: int, address: int, value: int, flags: int) -> None:
        if flags:
            raise Refused(INVALID_VALUE)
        word, stream = self._word(address), self.stream(handle)
        stream.push(lambda: stream.hold_until(lambda: word.value >= value))

    def _word(self, address: int) -> ctypes.c_uint64:
        if address % 8 or not self.attributes(address):
            raise Refused(INVALID_VALUE)
        return ctypes.c_uint64.from_address(address)

    def do_cuMemcpyAsync(self, dst: int, src: int, nbytes: int, handle: int) -> None:
        self.stream(handle).push(functools.partial(_discard, ctypes.memmove, dst, src, nbytes))

    do_cuMemcpyHtoDAsync_v2 = do_cuMemcpyAsync

    def do_cuMemcpyBatchAsync_v2(self, *args: Any) -> None:
        """One order of access for all, which the first index says; sizes of 0 and the default stream are refused."""
        *lists, count, attributes, first, num_attributes, handle = args
        if not (handle and count and num_attributes == 1 and first._obj.value == 0):
            raise Refused(INVALID_VALUE)
        if attributes._obj.source_access_order not in (1, 2, 3) or attributes._obj.flags:
            raise Refused(INVALID_VALUE)
        targets, sources, sizes = (list((ctypes.c_uint64 * count).from_address(place)) for place in lists)
        if 0 in sizes:
            raise Refused(INVALID_VALUE)

        def copy() -> None:
            for target, source, nbytes in zip(targets, sources, sizes, strict=True):
                ctypes.memmove(target, source, nbytes)

        self.stream(handle).push(copy)

    def do_cuMemcpyBatchAsync(self, *args: Any) -> None:
        *rest, wrong, handle = args
        wrong._obj.value = (1 << 64) - 1
        self.do_cuMemcpyBatchAsync_v2(*rest, handle)

    def do_cuMemsetD8Async(self, dst: int, value: int, nbytes: int, handle: int) -> None:
        self.stream(handle).push(functools.partial(_discard, ctypes.memset, dst, value, nbytes))

    def do_cuEventCreate(self, place: Any, flags: int) -> None:
        self.device()
        if flags & 4 and not flags & 2:
            raise Refused(INVALID_VALUE)
        handle = next(self._handles)
        self._events[handle] = FakeEvent(flags)
        put(place, handle)

    def do_cuEventRecord(self, event: int, handle: int) -> None:
        self._event(event).record(self.stream(handle))

    def do_cuEventQuery(self, event: int) -> None:
        if not self._event(event).reached():
            raise Refused(NOT_READY)

    def do_cuEventSynchronize(self, event: int) -> None:
        awaited = self._event(event)
        while not awaited.reached():
            time.sleep(_POLL_S)

    def do_cuEventDestroy_v2(self, event: int) -> None:
        self._event(event).close()
        del self._events[event]

    def do_cuIpcGetEventHandle(self, place: Any, event: int) -> None:
        exported = self._event(event)
        if not exported.flags & 4:
            raise Refused(INVALID_VALUE)
        place._obj.data[:] = pack_handle(b"fakeevt", exported.fd, 0, mmap.PAGESIZE)

    def do_cuIpcOpenEventHandle(self, place: Any, handle: Any) -> None:
        self.device()
        fd, _ = open_handle(b"fakeevt", bytes(handle.data))
        number = next(self._handles)
        self._events[number] = FakeEvent(2, fd)
        put(place, number)

    def do_cuModuleLoadData(self, place: Any, image: bytes) -> None:
        self.device()
        del image
        put(place, next(self._handles))

    def do_cuModuleUnload(self, module: int) -> None:
        self.device()
        del module

    def do_cuModuleGetFunction(self, place: Any, module: int, name: bytes) -> None:
        del module
        if name.decode() not in self.kernels:
            raise Refused(NOT_FOUND)
        function = next(self._handles)
        self._names[function] = name.decode()
        put(place, function)

    def do_cuLaunchKernel(self, function: int, *rest: Any) -> None:
        stream, places = rest[7], rest[8]
        if function not in self._names or 0 in rest[:6]:
            raise Refused(INVALID_VALUE)
        self.stream(stream).push(self.kernels[self._names[function]](list(places)))
