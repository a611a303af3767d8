"""What the kernels of copy_chunks.cu do, for the double of the driver."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import kvferry.copy
from doubles.fake_cuda import FakeDriver
from doubles.fake_work import FakeWork

_STRIP_WORDS = 5
_PAIR_WORDS = 5
_CTAS = 2
_ILLEGAL_ADDRESS = 700


def install(driver: FakeDriver) -> None:
    """Let modules that are loaded from now on have the kernels."""
    driver.fake.kernels["copy_chunks"] = _copy_chunks
    driver.fake.kernels["copy_pairs"] = partial(_copy_pairs, driver.fake)


def compile_source(folder: Path) -> ctypes.CDLL:
    """The kernel's own source, compiled for this processor by g++, with checks for undefined behaviour."""
    library = folder / "copy_chunks.so"
    kernel = Path(kvferry.copy.__file__).with_name("copy_chunks.cu")
    options = ["-O1", "-fsanitize=undefined,alignment", "-fsanitize-undefined-trap-on-error", "-shared", "-fPIC"]
    source = Path(__file__).with_name("copy_chunks_on_host.cpp")
    command = ["g++", "-std=c++17", *options, f'-DKERNEL="{kernel}"', str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=50)
    return ctypes.CDLL(str(library))


def install_source(driver: FakeDriver, library: ctypes.CDLL) -> None:
    """Like `install`, but what runs is the compiled source."""
    function = library.run_copy_chunks
    function.argtypes = (ctypes.c_uint32, *[ctypes.c_uint64] * 8, ctypes.c_uint32)
    function.restype = None

    def launch(places: list[int]) -> Callable[[], None]:
        words = [ctypes.c_uint64.from_address(place).value for place in places[:-1]]
        to_flat = ctypes.c_uint32.from_address(places[-1]).value

        def run() -> None:
            function(_CTAS, *words, to_flat)

        return run

    driver.fake.kernels["copy_chunks"] = launch
    pairs = library.run_copy_pairs
    pairs.argtypes = (ctypes.c_uint32, *[ctypes.c_uint64] * 5)
    pairs.restype = None

    def launch_pairs(places: list[int]) -> Callable[[], None]:
        words = [ctypes.c_uint64.from_address(place).value for place in places]
        return lambda: pairs(_CTAS, *words)

    driver.fake.kernels["copy_pairs"] = launch_pairs


def _copy_chunks(places: list[int]) -> Callable[[], None]:
    words = [ctypes.c_uint64.from_address(place).value for place in places[:-1]]
    strips_at, num_strips, ids_at, blocks, chunk_bytes, begin, end, staging = words
    to_flat = ctypes.c_uint32.from_address(places[-1]).value

    def run() -> None:
        # The table is read when the kernel runs, as on a GPU: one that was written again too early shows.
        strips = (ctypes.c_uint64 * (_STRIP_WORDS * num_strips)).from_address(strips_at)
        chunks = range(begin // chunk_bytes, -(-end // chunk_bytes))
        for chunk, index, block in itertools.product(chunks, range(num_strips), range(blocks)):
            start, stride, nbytes, place, pitch = strips[_STRIP_WORDS * index : _STRIP_WORDS * (index + 1)]
            block_id = ctypes.c_int32.from_address(ids_at + 4 * (chunk * blocks + block)).value
            at = chunk * chunk_bytes + place + block * pitch
            first, stop = max(at, begin), min(at + nbytes, end)
            if block_id < 0 or first >= stop:
                continue
            paged = start + block_id * stride + first - at
            staged = staging + first - begin
            ctypes.memmove(*((staged, paged) if to_flat else (paged, staged)), stop - first)

    return run


def _copy_pairs(fake: FakeWork, places: list[int]) -> Callable[[], None]:
    pairs_at, num_pairs, to_at, from_at, blocks = (ctypes.c_uint64.from_address(place).value for place in places)
    device = fake.device()

    def run() -> None:
        pairs = (ctypes.c_uint64 * (_PAIR_WORDS * num_pairs)).from_address(pairs_at)
        to_ids = (ctypes.c_int32 * blocks).from_address(to_at)
        from_ids = (ctypes.c_int32 * blocks).from_address(from_at)
        for block, index in itertools.product(range(blocks), range(num_pairs)):
            to, to_stride, source, from_stride, nbytes = pairs[_PAIR_WORDS * index : _PAIR_WORDS * (index + 1)]
            target, start = to + to_ids[block] * to_stride, source + from_ids[block] * from_stride
            if not (fake.kernel_reaches(device, target) and fake.kernel_reaches(device, start)):
                fake.failures["cuEventQuery"] = [_ILLEGAL_ADDRESS] * 1000  # from now on
                return
            ctypes.memmove(target, start, nbytes)

    return run
