"""The real library of its wheel, as far as it goes without a GPU; and its header against our table."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvferry.errors import NcclCallError
from kvferry.p2p.nccl import NCCLLibrary
from kvferry.p2p.nccl.functions import FUNCTIONS, ncclConfig, ncclUniqueId


def wheel_folder() -> Path:
    spec = importlib.util.find_spec("nvidia")
    for home in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(home) / "nccl" / "lib" / "libnccl.so.2").exists():
            return Path(home) / "nccl"
    pytest.skip("no wheel nvidia-nccl-cu13 (of the extra `test`) or nvidia-nccl-cu12 is installed")


@pytest.fixture(scope="module")
def library() -> NCCLLibrary:
    return NCCLLibrary(str(wheel_folder() / "lib" / "libnccl.so.2"))


def test_version(library: NCCLLibrary) -> None:
    assert re.fullmatch(r"2\.\d+\.\d+", library.ncclGetVersion())
    assert library.version >= 21800


def test_unique_ids_differ(library: NCCLLibrary) -> None:
    assert len({bytes(library.ncclGetUniqueId()) for _ in range(3)}) == 3


def test_error_texts(library: NCCLLibrary) -> None:
    assert "invalid argument" in library.ncclGetErrorString(4)
    with pytest.raises(NcclCallError, match="ncclCommGetAsyncError failed: invalid argument") as seen:
        library.ncclCommGetAsyncError(0)
    assert seen.value.code == 4


def test_it_has_every_function_of_the_table(library: NCCLLibrary) -> None:
    assert all(library.has(name) for name in FUNCTIONS)


def test_the_structures_are_the_headers(library: NCCLLibrary, tmp_path: Path) -> None:
    """Our configuration is the beginning of the library's, which takes a shorter one of an older version."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc)")
    for name, text in {
        "cuda_runtime.h": "typedef struct CUstream_st *cudaStream_t; typedef struct CUevent_st *cudaEvent_t;",
        "cuda_fp16.h": "",
    }.items():
        (tmp_path / name).write_text(text)
    fields = ["size", "magic", "version", "blocking", "cgaClusterSize", "minCTAs", "maxCTAs", "netName", "splitShare"]
    (tmp_path / "say.c").write_text(
        "#include <stdio.h>\n#include <stddef.h>\n#include <limits.h>\n#include <nccl.h>\n"
        "int main(void) { ncclConfig_t c = NCCL_CONFIG_INITIALIZER;\n"
        + "".join(f'printf("%zu ", offsetof(ncclConfig_t, {field}));\n' for field in fields)
        + 'printf("%zu %x %d %d %d %d\\n", sizeof(ncclUniqueId), c.magic, c.maxCTAs, ncclUint8, ncclSystemError,'
        " ncclInProgress); return 0; }\n"
    )
    program = tmp_path / "say"
    include = ("-I", str(tmp_path), "-I", str(wheel_folder() / "include"))
    subprocess.run([compiler, *include, "-o", str(program), str(tmp_path / "say.c")], check=True, timeout=50)
    said = subprocess.run([program], capture_output=True, text=True, check=True, timeout=10).stdout.split()
    ours = ncclConfig.non_blocking(8)
    assert [int(offset) for offset in said[: len(fields)]] == [
        getattr(ncclConfig, name).offset for name, *_ in ncclConfig._fields_
    ]
    assert said[len(fields) :] == [
        str(ctypes.sizeof(ncclUniqueId)),
        f"{ours.magic:x}",
        str(ours.min_ctas),
        "1",
        "2",
        "7",
    ]
