"""The ground of the driver double: devices, contexts, counted and refusable calls.

Every function of libcuda is a method `do_<name>` that takes what the C function takes (ints, `byref` objects,
structures) and raises `Refused` where the driver would return an error.
"""

from __future__ import annotations

import collections
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

INVALID_VALUE = 1
NOT_INITIALIZED = 3
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
PEER_ACCESS_ALREADY_ENABLED = 704
NAMES = {
    1: b"CUDA_ERROR_INVALID_VALUE",
    2: b"CUDA_ERROR_OUT_OF_MEMORY",
    101: b"CUDA_ERROR_INVALID_DEVICE",
    201: b"CUDA_ERROR_INVALID_CONTEXT",
    208: b"CUDA_ERROR_ALREADY_MAPPED",
    400: b"CUDA_ERROR_INVALID_HANDLE",
    500: b"CUDA_ERROR_NOT_FOUND",
    600: b"CUDA_ERROR_NOT_READY",
    800: b"CUDA_ERROR_NOT_PERMITTED",
    801: b"CUDA_ERROR_NOT_SUPPORTED",
}


class Refused(Exception):
    """What a call returns instead of success."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def put(place: Any, value: int) -> None:
    """Write to an output parameter made by `byref`."""
    place._obj.value = value


def uuid_of(physical: int) -> bytes:
    """The UUID of the host's GPU with that number, the same in every process."""
    return hashlib.sha256(b"fake gpu %d" % physical).digest()[:16]


class FakeBase:
    """Devices and contexts. `visible` are the host's GPUs that this process sees, in its order."""

    def __init__(self, visible: Sequence[int], mig: bool) -> None:
        self.visible = list(visible)
        self.mig = mig
        self.calls: collections.Counter[str] = collections.Counter()
        self.failures: dict[str, list[int]] = {}  # name -> what its next calls return, 0 for "works"
        self.active: set[int] = set()
        self.peers: set[tuple[int, int]] = set()  # devices, and those whose memory they reach
        self.lock = threading.RLock()
        self._local = threading.local()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        method = getattr(type(self), f"do_{name}", None)
        if method is None:
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls[name] += 1
            planned = self.failures.get(name)
            code = planned.pop(0) if planned else 0
            if code:
                return code
            try:
                method(self, *args)
            except Refused as refusal:
                return refusal.code
            return 0

        return call

    @property
    def stack(self) -> list[int]:
        """This thread's contexts; a new thread has none."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[int] = self._local.stack
        return stack

    def device(self) -> int:
        """The current context's device."""
        if not self.stack:
            raise Refused(INVALID_CONTEXT)
        return self.stack[-1] - 0x1000

    def _known(self, device: int) -> int:
        if not 0 <= device < len(self.visible):
            raise Refused(INVALID_DEVICE)
        return device

    def do_cuInit(self, flags: int) -> None:
        del flags

    def do_cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = NAMES.get(code, b"CUDA_ERROR_UNKNOWN")

    def do_cuGetErrorString(self, code: int, text: Any) -> None:
        text._obj.value = b"the double says so (%d)" % code

    def do_cuDeviceGetCount(self, count: Any) -> None:
        put(count, len(self.visible))

    def do_cuDeviceGet(self, device: Any, ordinal: int) -> None:
        put(device, self._known(ordinal))

    def do_cuDeviceGetUuid(self, uuid: Any, device: int) -> None:
        uuid._obj.data[:] = uuid_of(self.visible[self._known(device)])

    def do_cuDeviceGetUuid_v2(self, uuid: Any, device: int) -> None:
        raw = uuid_of(self.visible[self._known(device)])
        uuid._obj.data[:] = raw[::-1] if self.mig else raw

    def do_cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:
        self._known(device)
        put(value, {75: 9, 76: 0}[attribute])

    def do_cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        self.active.add(self._known(device))
        put(context, 0x1000 + device)

    def do_cuDevicePrimaryCtxGetState(self, device: int, flags: Any, active: Any) -> None:
        put(flags, 0)
        put(active, int(self._known(device) in self.active))

    def do_cuCtxPushCurrent_v2(self, context: int) -> None:
        if context - 0x1000 not in self.active:
            raise Refused(INVALID_CONTEXT)
        self.stack.append(context)

    def do_cuCtxEnablePeerAccess(self, context: int, flags: int) -> None:
        if flags or context - 0x1000 not in self.active or context == self.stack[-1]:
            raise Refused(INVALID_VALUE)
        pair = self.device(), context - 0x1000
        if pair in self.peers:
            raise Refused(PEER_ACCESS_ALREADY_ENABLED)
        self.peers.add(pair)

    def do_cuCtxPopCurrent_v2(self, context: Any) -> None:
        if not self.stack:
            raise Refused(INVALID_CONTEXT)
        put(context, self.stack.pop())

    def do_cuCtxGetCurrent(self, context: Any) -> None:
        put(context, self.stack[-1] if self.stack else 0)
