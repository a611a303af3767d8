"""Pages of 64-bit values that one process writes and another reads, from the host or in stream order."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvferry.cuda.device import bound
from kvferry.cuda.memory import host_device_pointer, register_host, tensor_from_pointer, unregister_host
from kvferry.cuda.stream import Stream, synchronize_device, write_value64
from kvferry.errors import DeadlineError
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.mapping_records import MappingKey, Opened
from kvferry.ipc.mappings import MappingRef
from kvferry.ipc.raw import RawCudaIPCWrapper
from kvferry.ipc.shared_memory import Segment
from kvferry.ipc.table import new_token, process_table

if TYPE_CHECKING:
    from kvferry.ipc.wrapper import DeviceIPCWrapper

WORD_BYTES = 8
_WORD = struct.Struct("<q")
_DEVICE_READ_TIMEOUT_S = 5.0


class Page(ABC):
    """Words that only grow. `wrapper` is what travels, or came; the page closes it."""

    def __init__(self, wrapper: DeviceIPCWrapper) -> None:
        self.wrapper = wrapper
        self.slots = wrapper.shape[0]

    @abstractmethod
    def read(self, slot: int) -> int:
        """The word, now."""

    @abstractmethod
    def write(self, slot: int, value: int) -> None:
        """Store a word from the host, at once, whatever any stream is doing."""

    @abstractmethod
    def device_address(self, slot: int, device: int) -> int:
        """Where the device sees the word."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the page holds; idempotent."""


class HostPage(Page):
    """A page of shared host memory. Any process that maps it can read and write it, the other dead or alive."""

    def __init__(self, wrapper: DeviceIPCWrapper) -> None:
        super().__init__(wrapper)
        self._tensor: torch.Tensor = wrapper.to_tensor()
        self._words = (ctypes.c_int64 * self.slots).from_address(self._tensor.data_ptr())
        self._pinned: MappingRef | None = None

    @classmethod
    def make(cls, slots: int) -> HostPage:
        """A new page of zeros."""
        segment = Segment(slots * WORD_BYTES)
        return cls(HostIPCWrapper(segment.tensor(0, slots * WORD_BYTES).view(torch.int64)))

    def read(self, slot: int) -> int:
        return self._words[slot]

    def write(self, slot: int, value: int) -> None:
        self._words[slot] = value

    def pin(self, device: int) -> None:
        """Register the page with CUDA, once per process, until the last user of it has closed."""
        if self._pinned is not None:
            return
        address = self._tensor.data_ptr()
        key = MappingKey(b"", address, b"pinned:" + struct.pack("<QQ", address, device))
        self._pinned = process_table().mappings.acquire(key, partial(_pin, self._tensor, device))

    def device_address(self, slot: int, device: int) -> int:
        self.pin(device)
        assert self._pinned is not None
        return self._pinned.address + slot * WORD_BYTES

    def close(self) -> None:
        if self._pinned is not None:
            self._pinned.release()
        self.wrapper.close()


def _pin(tensor: torch.Tensor, device: int) -> Opened:
    """Register the tensor's page; undone on the unmapper's thread, once the device has done what it had to do."""
    address, nbytes = tensor.data_ptr(), tensor.numel() * WORD_BYTES
    register_host(address, nbytes, device=device)
    kept = [tensor]  # streams may still write to the memory

    def close() -> None:
        try:
            synchronize_device(device)
        finally:
            unregister_host(address, device=device)
            kept.clear()

    try:
        return Opened(host_device_pointer(address, device=device), nbytes, close)
    except BaseException:
        unregister_host(address, device=device)
        raise


class DevicePage(Page):
    """A page of device memory, for processes that can pass no file descriptor. Reading it costs a copy.

    The stream that reads and writes it is of high priority, so that it does not share a hardware queue with streams
    that wait for one of these words. `memory` is held until the page is closed.
    """

    def __init__(self, wrapper: DeviceIPCWrapper, device: int, memory: MappingRef | None = None) -> None:
        super().__init__(wrapper)
        self._memory = memory
        self._tensor: torch.Tensor = wrapper.to_tensor()
        self._address = self._tensor.data_ptr()
        self._device = device
        self._stream = Stream(device, priority=-1)

    @classmethod
    def make(cls, device: int, slots: int) -> DevicePage:
        """A new page of zeros, in an allocation of its own, which can be sent whatever torch allocates with."""
        nbytes = slots * WORD_BYTES
        key = MappingKey(b"", 0, b"words:" + new_token())
        with contextlib.ExitStack() as undo:
            memory = process_table().mappings.acquire(key, partial(_allocate, device, nbytes))
            undo.callback(memory.release)
            tensor = tensor_from_pointer(memory.address, nbytes, device=device, owner=None)
            wrapper = RawCudaIPCWrapper(tensor.view(torch.int64))
            undo.callback(wrapper.close)
            page = cls(wrapper, device, memory)
            undo.callback(page.close)
            page.clear()
            undo.pop_all()
        return page

    def clear(self) -> None:
        """Zero the page; by the process that made it, before it is sent."""
        self._stream.memset_async(self._address, 0, self.slots * WORD_BYTES)
        self._finish()

    def read(self, slot: int) -> int:
        word = ctypes.create_string_buffer(WORD_BYTES)  # of this call alone: other threads may read other slots
        self._stream.memcpy_async(ctypes.addressof(word), self._address + slot * WORD_BYTES, WORD_BYTES)
        self._finish()
        return int(_WORD.unpack(word.raw)[0])

    def write(self, slot: int, value: int) -> None:
        write_value64(self._stream.handle, self._address + slot * WORD_BYTES, value, device=self._device)
        self._finish()

    def device_address(self, slot: int, device: int) -> int:
        return self._address + slot * WORD_BYTES

    def _finish(self) -> None:
        deadline = time.monotonic() + _DEVICE_READ_TIMEOUT_S
        while not self._stream.query():
            if time.monotonic() > deadline:
                raise DeadlineError(f"device {self._device} did not copy one word within {_DEVICE_READ_TIMEOUT_S} s")
            time.sleep(0)

    def close(self) -> None:
        self._stream.close()
        self.wrapper.close()
        if self._memory is not None:
            self._memory.release()


def _allocate(device: int, nbytes: int) -> Opened:
    """Memory of the device; given back on the unmapper's thread, once the device has done what it had to do."""
    with bound(device) as drv:
        address = drv.mem_alloc(nbytes)
    return Opened(address, nbytes, partial(_free, device, address))


def _free(device: int, address: int) -> None:
    with bound(device) as drv:
        try:
            drv.context_synchronize()  # streams may still write to it
        finally:
            drv.mem_free(address)
