"""The double of NCCL, nccl_double.c: built by the system's compiler, and tied to the streams of the driver's double."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from doubles.fake_cuda import FakeDriver, installed
from kvferry.cuda.device import bound

_SOURCE = Path(__file__).with_name("nccl_double.c")
_ENQUEUE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


def build(folder: Path, *flags: str) -> Path:
    """Compile the double into `folder`; skips the test where there is no C compiler (CI has one)."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) to build the double of NCCL with")
    target = folder / "libnccl-double.so"
    options = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-pthread")
    command = [compiler, *options, *flags, "-o", str(target), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return target


class NcclDouble:
    """The loaded double, whose launches go into the streams of `driver`; for one driver at a time."""

    def __init__(self, path: Path, driver: FakeDriver) -> None:
        self.library = ctypes.CDLL(str(path))
        self._run = self.library.nccl_double_run
        self._run.argtypes = (ctypes.c_void_p,)
        self._run.restype = None

        def enqueue(stream: int, launch: int) -> None:
            driver.fake.stream_of_any_device(stream).push(lambda: self._run(launch))

        self._enqueue = _ENQUEUE(enqueue)  # kept: the library holds it
        self.library.nccl_double_set_enqueue(self._enqueue)

    @property
    def num_communicators(self) -> int:
        return int(self.library.nccl_double_num_communicators())

    @property
    def num_registered(self) -> int:
        return int(self.library.nccl_double_num_registered())


@contextlib.contextmanager
def doubles(path: Path, visible: tuple[int, ...] = (0, 1)) -> Iterator[tuple[FakeDriver, NcclDouble]]:
    """Both doubles, installed: the driver's, over the host's GPUs `visible`, and the NCCL at `path`."""
    with installed(visible) as driver:
        double = NcclDouble(path, driver)  # kept until the end, whatever becomes of what is given: the library calls it
        yield driver, double


def memory(device: int, nbytes: int) -> int:
    """The address of new memory of the driver's double."""
    with bound(device) as drv:
        return drv.mem_alloc(nbytes)
