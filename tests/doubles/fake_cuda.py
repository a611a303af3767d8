"""A double of the CUDA driver over host memory, for machines without a GPU.

It keeps the real driver's rules, across processes too: a new thread has no context; a handle is given for the base of
a cudaMalloc allocation only; a process cannot open its own handle, nor one handle twice; the exporter's memory stays
while another process maps it, also when the exporter is killed; streams run beside the host. Tensors over its memory
are CPU tensors, so code under test has to ask the driver, not the tensor, what memory it is.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from doubles.fake_work import FakeWork
from kvferry.cuda.driver import Driver, set_driver_for_testing


class FakeDriver(Driver):
    """The real `Driver` over the double; `fake` has its inside: calls counted, failures to come, kernels."""

    def __init__(self, visible: Sequence[int] = (0,), *, mig: bool = False, old: bool = False) -> None:
        self.fake = FakeWork(visible, mig)
        super().__init__(self.fake)
        if old:
            for name in ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"):
                del self._functions[name]

    def make_tensor(self, address: int, nbytes: int, device: int, owner: object) -> torch.Tensor:
        assert self.fake.device() == device, "make_tensor needs the device's context"
        kind: Any = type("Bytes", (ctypes.c_ubyte * nbytes,), {})
        view = kind.from_address(address)
        view.owner = owner
        tensor = torch.frombuffer(view, dtype=torch.uint8)
        assert tensor.data_ptr() == address
        return tensor

    def compile_ptx(self, source: str, ordinal: int) -> bytes:
        del ordinal
        return source.encode()


@contextlib.contextmanager
def installed(visible: Sequence[int] = (0,), *, mig: bool = False, old: bool = False) -> Iterator[FakeDriver]:
    """Use a new double as this process's driver inside the block; an `old` one is from before CUDA 12.8."""
    driver = FakeDriver(visible, mig=mig, old=old)
    set_driver_for_testing(driver)
    try:
        yield driver
    finally:
        driver.fake.stop()
        set_driver_for_testing(None)
