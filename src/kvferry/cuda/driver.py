"""The driver of this process: found once, refused in forked children, replaceable by tests."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import uuid
from typing import Any

import torch

from kvferry.cuda.functions import SUCCESS, DeviceAttribute
from kvferry.cuda.memory_calls import MemoryCalls, VmmCalls
from kvferry.cuda.nvrtc_library import compile_source
from kvferry.cuda.work_calls import DeviceCalls, KernelCalls, StreamCalls
from kvferry.errors import CudaUnavailableError, ShareError

_LIBCUDA = "libcuda.so.1"
_MAX_REMEMBERED = 4096


class Driver(DeviceCalls, MemoryCalls, VmmCalls, StreamCalls, KernelCalls):
    """Every driver call that the project makes, typed; thread-safe as the driver is."""

    def __init__(self, functions: Any) -> None:
        super().__init__(functions)
        self._primary: dict[int, int] = {}
        self._primary_lock = threading.Lock()
        self._uuids: list[str] = []
        # What was found out about allocations, by buffer id. The driver never gives one twice, so nothing here is ever
        # out of date: many tensors of one allocation cost one look.
        self.allocations: dict[int, object] = {}

    def primary_context(self, ordinal: int) -> int:
        """The device's primary context, which torch and the CUDA runtime use too; retained once, until exit."""
        context = self._primary.get(ordinal)
        if context is None:
            # Two threads may both come here: the second retain is given no release, which the driver only counts.
            context = self.retain_primary_context(ordinal)
            with self._primary_lock:
                self._primary[ordinal] = context
        return context

    def remember(self, buffer_id: int, info: object) -> None:
        """Keep what is known of an allocation; of very many, start anew."""
        if len(self.allocations) >= _MAX_REMEMBERED:
            self.allocations = {}
        self.allocations[buffer_id] = info

    def visible_uuids(self) -> list[str]:
        """The UUIDs of all devices by ordinal, as nvidia-smi writes them; they stay the same as long as the process."""
        if not self._uuids:
            raw = [self.device_uuid(ordinal) for ordinal in range(self.device_count())]
            self._uuids = [f"{'MIG' if mig else 'GPU'}-{uuid.UUID(bytes=number)}" for number, mig in raw]
        return self._uuids

    def make_tensor(self, address: int, nbytes: int, device: int, owner: object) -> torch.Tensor:
        """A flat uint8 tensor over device memory; `owner` lives as long as any view of it.

        The device's context has to be current, so that torch looks at the right one in a thread that has none.
        """
        view = _DeviceBytes(address, nbytes, owner)
        tensor = torch.as_tensor(view, device=torch.device("cuda", device))
        if tensor.data_ptr() != address:
            raise ShareError(
                f"torch copied {nbytes} bytes at {address:#x} on device {device} instead of using them in place: "
                "the memory belongs to another device"
            )
        return tensor

    def compile_ptx(self, source: str, ordinal: int) -> bytes:
        """Compile CUDA C++ for the device's architecture."""
        major = self.device_attribute(DeviceAttribute.COMPUTE_CAPABILITY_MAJOR, ordinal)
        minor = self.device_attribute(DeviceAttribute.COMPUTE_CAPABILITY_MINOR, ordinal)
        return compile_source(source, f"compute_{major}{minor}")


class _DeviceBytes:
    """Device memory as torch takes it without copying; torch keeps this object while it uses the memory."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


class _Holder:
    """What was found out about this process's driver."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.looked = False
        self.driver: Driver | None = None
        self.reason = ""
        os.register_at_fork(after_in_child=self._after_fork_in_child)

    def _after_fork_in_child(self) -> None:
        self.lock = threading.Lock()  # whoever held it stayed in the parent

    def load(self) -> Driver | None:
        if self.looked:  # from then on nothing changes: no lock to wait for
            return self.driver
        with self.lock:
            if not self.looked:
                self.driver, self.reason = _find_driver()
                self.looked = True
            return self.driver


@functools.cache
def _holder() -> _Holder:
    return _Holder()


def _find_driver() -> tuple[Driver | None, str]:
    """The driver, initialised; or None and why not."""
    try:
        driver = Driver(ctypes.CDLL(_LIBCUDA))
    except OSError as error:
        return None, f"{_LIBCUDA} cannot be loaded ({error}): there is no NVIDIA driver here"
    code = driver.result("cuInit", 0)
    if code != SUCCESS:
        return None, f"the driver cannot be initialised: {driver.error('cuInit', code)}"
    if driver.device_count() == 0:
        return None, "the driver sees no device: look at CUDA_VISIBLE_DEVICES"
    return driver, ""


def load_driver() -> Driver | None:
    """The driver; None where there is none, no device, or this is a child forked after CUDA was in use.

    Initialises CUDA in this process, which makes it unusable in children forked later.
    """
    found = _holder().load()
    return found if found is not None and found.usable else None


def driver() -> Driver:
    """The driver.

    Raises:
        CudaUnavailableError: there is none; the text says why.
    """
    found = _holder().load()
    if found is None:
        raise CudaUnavailableError(_holder().reason)
    if not found.usable:
        found.result("cuInit", 0)  # raises, and says that it is the fork
    return found


def initialised_driver() -> Driver | None:
    """The driver if CUDA is in use in this process already, by whomever; never initialises it.

    So looking at host memory in a process that has not begun to use CUDA leaves it free to fork.
    """
    holder = _holder()
    if holder.looked:
        return load_driver()
    with contextlib.suppress(OSError):
        loaded = ctypes.CDLL(_LIBCUDA, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        if loaded.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == SUCCESS:
            return load_driver()
    return None


def set_driver_for_testing(replacement: Driver | None) -> None:
    """Use `replacement` from now on; None forgets it, and the real driver is looked for again."""
    holder = _holder()
    with holder.lock:
        holder.looked = False
        holder.driver = replacement
        holder.looked = replacement is not None
