"""Many copies in one call, past the caches: as fast as one big memcpy, whatever the size of the blocks.

The C library's memcpy stores past the caches only for single copies of many MiB; paged blocks of 64 KiB get little more
than half of that speed from it. Python can call nothing that does better, so a few instructions are kept here.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

CopyRows = Callable[[npt.NDArray[np.int64]], None]

# Assembled from streaming.S.
STREAM_ROWS = bytes.fromhex(
    "4989fa4989f34d85db0f84d9010000498b3a498b7208498b52104889f948f7d983e10f4839d1480f47ca4829caf3a44881fa00400000"
    "0f82600100004989f14983fb0174044d8b4a204c8d86004000004881fa008000004d0f43c8b840000000410f1809410f188900100000"
    "410f188900200000410f188900300000f30f6f06f30f6f4e10f30f6f5620f30f6f5e30f30f6fa600100000f30f6fae10100000f30f6f"
    "b620100000f30f6fbe30100000f3440f6f8600200000f3440f6f8e10200000f3440f6f9620200000f3440f6f9e30200000f3440f6fa6"
    "00300000f3440f6fae10300000f3440f6fb620300000f3440f6fbe30300000660fe707660fe74f10660fe75720660fe75f30660fe7a7"
    "00100000660fe7af10100000660fe7b720100000660fe7bf3010000066440fe7870020000066440fe78f1020000066440fe797202000"
    "0066440fe79f3020000066440fe7a70030000066440fe7af1030000066440fe7b72030000066440fe7bf303000004883c6404883c740"
    "ffc80f85fafeffff4881c6003000004881c7003000004881ea00400000e993feffff4883fa407234f30f6f06f30f6f4e10f30f6f5620"
    "f30f6f5e30660fe707660fe74f10660fe75720660fe75f304883c6404883c7404883ea40ebc64889d1f3a44983c21849ffcb0f8527fe"
    "ffff0faef8c3"
)


class StreamingCopy:
    """The machine code of streaming.S, loaded into a page of its own. Calls release the GIL."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        place = ctypes.addressof(ctypes.c_char.from_buffer(page))
        self._call: Callable[[int, int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)(place)

    @classmethod
    def load(cls) -> StreamingCopy | None:
        """None where the processor is another, or the system allows no code outside files."""
        if platform.machine() != "x86_64":
            return None
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.write(STREAM_ROWS)
        place = ctypes.addressof(ctypes.c_char.from_buffer(page))
        protect = ctypes.CDLL(None).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        refused = protect(place, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
        return None if refused else cls(page)

    def copy_rows(self, rows: npt.NDArray[np.int64]) -> None:
        """Copy `nbytes` from `source` to `target` for each row (target, source, nbytes), in order."""
        assert rows.dtype == np.int64
        assert rows.shape[1:] == (3,)
        assert rows.flags.c_contiguous
        self._call(rows.ctypes.data, len(rows))


def row_copier() -> CopyRows:
    """What copies rows as `StreamingCopy.copy_rows` does; where that cannot be loaded, with the C library's memmove."""
    streaming = StreamingCopy.load()
    return _move_rows if streaming is None else streaming.copy_rows


def _move_rows(rows: npt.NDArray[np.int64]) -> None:
    for target, source, nbytes in rows.tolist():
        ctypes.memmove(target, source, nbytes)
