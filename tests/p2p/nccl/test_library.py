from __future__ import annotations

import ctypes.util
import shutil
import threading
from pathlib import Path

import pytest

from doubles.nccl_double import build
from kvferry.errors import NcclCallError, NcclLibraryError
from kvferry.p2p.nccl import NCCLLibrary


@pytest.fixture
def library(nccl_so: Path) -> NCCLLibrary:
    return NCCLLibrary(str(nccl_so))


def test_version_and_texts(library: NCCLLibrary) -> None:
    assert library.ncclGetVersion() == "2.28.9"
    assert library.ncclGetErrorString(5) == "invalid usage"
    assert "NCCL 2.28.9" in repr(library)
    assert not library.is_rccl


def test_an_error_names_the_call_the_code_and_what_nccl_says(
    library: NCCLLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DOUBLE_FAIL", "ncclGetUniqueId:2")
    with pytest.raises(
        NcclCallError, match=r"ncclGetUniqueId failed: unhandled system error; the double was told"
    ) as seen:
        library.ncclGetUniqueId()
    assert (seen.value.call, seen.value.code) == ("ncclGetUniqueId", 2)


def test_a_unique_id_travels_as_bytes(library: NCCLLibrary) -> None:
    unique_id = library.ncclGetUniqueId()
    assert len(bytes(unique_id.internal)) == 128
    assert bytes(library.unique_id_from_bytes(bytes(unique_id))) == bytes(unique_id)
    for wrong in (b"", bytes(127), bytes(129)):
        with pytest.raises(ValueError, match="128 bytes"):
            library.unique_id_from_bytes(wrong)


def test_one_file_is_bound_once_whatever_it_is_called(nccl_so: Path, tmp_path: Path) -> None:
    link, copy = tmp_path / "link.so", tmp_path / "copy.so"
    link.symlink_to(nccl_so)
    shutil.copy(nccl_so, copy)
    library = NCCLLibrary(str(nccl_so))
    assert NCCLLibrary(str(link))._functions is library._functions
    assert NCCLLibrary(str(copy))._functions is not library._functions


def test_a_file_that_is_not_nccl_is_told_so(tmp_path: Path) -> None:
    text = tmp_path / "libnccl.so.2"
    text.write_bytes(b"\x7fELF and nothing more")
    for path in (text, tmp_path / "missing"):
        with pytest.raises(NcclLibraryError, match=f"{path} cannot be loaded as an NCCL library"):
            NCCLLibrary(str(path))
    other = ctypes.util.find_library("m")
    assert other is not None
    with pytest.raises(NcclLibraryError, match=r"is not an NCCL library: it has no ncclGetVersion"):
        NCCLLibrary(other)


def test_an_nccl_that_is_too_old_is_refused(nccl_so: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DOUBLE_VERSION", "21703")
    with pytest.raises(NcclLibraryError, match=r"is NCCL 2\.17\.3: at least 2\.18\.0 is needed"):
        NCCLLibrary(str(nccl_so))
    monkeypatch.setenv("NCCL_DOUBLE_VERSION", "21800")
    NCCLLibrary(str(nccl_so))


def test_what_only_newer_ones_have_is_missed_when_it_is_called(tmp_path: Path) -> None:
    library = NCCLLibrary(str(build(tmp_path, "-DWITHOUT_REGISTER")))
    assert not library.has("ncclCommRegister")
    assert library.has("ncclSend")
    with pytest.raises(NcclLibraryError, match=r"has no ncclMemAlloc: NCCL 2\.19 or newer is needed"):
        library.ncclMemAlloc(10)


def test_rccl_is_known_by_its_name_and_marked(nccl_so: Path, tmp_path: Path) -> None:
    copy = tmp_path / "librccl.so.1"
    shutil.copy(nccl_so, copy)
    library = NCCLLibrary(str(copy))
    assert library.is_rccl
    assert "RCCL (not tested)" in repr(library)


def test_memory_of_nccls_own(library: NCCLLibrary) -> None:
    address = library.ncclMemAlloc(1000)
    assert address
    library.ncclMemFree(address)


def test_groups_are_balanced(library: NCCLLibrary) -> None:
    with pytest.raises(NcclCallError, match="ncclGroupEnd"):
        library.ncclGroupEnd()
    library.ncclGroupStart()
    library.ncclGroupEnd()


def test_two_ranks_join_by_the_call_that_blocks(library: NCCLLibrary) -> None:
    unique_id, comms = library.ncclGetUniqueId(), []
    threads = [
        threading.Thread(target=lambda rank=rank: comms.append(library.ncclCommInitRank(2, unique_id, rank)))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(comms)) == 2
    for comm in comms:
        assert library.ncclCommGetAsyncError(comm)
        library.ncclCommAbort(comm)
        with pytest.raises(NcclCallError, match="the communicator was freed"):
            library.ncclCommAbort(comm)
