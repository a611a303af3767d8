"""Segments, allocate_shared and rehome."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from doubles.host_files import count_fds
from kvferry.errors import ShareError, UnsupportedMemoryError
from kvferry.ipc.shared_memory import (
    F_GET_SEALS,
    FileIdentity,
    Segment,
    allocate_shared,
    find_segment,
    rehome,
)


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        return any(int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16) for line in maps)


def test_a_segment_is_a_sealed_zeroed_whole_number_of_pages() -> None:
    with_one_byte = Segment(1)
    assert with_one_byte.nbytes == os.sysconf("SC_PAGESIZE")
    assert fcntl.fcntl(with_one_byte.fd, F_GET_SEALS) == 1 | 2 | 4  # seal, shrink, grow
    assert not os.get_inheritable(with_one_byte.fd)
    with pytest.raises(PermissionError):
        os.ftruncate(with_one_byte.fd, 0)
    assert not with_one_byte.tensor().any()
    assert FileIdentity.of(with_one_byte.fd) == with_one_byte.identity


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_segment_of_no_bytes_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        Segment(nbytes)


def test_a_segment_that_cannot_be_had_is_a_share_error_and_leaves_no_descriptor() -> None:
    before = count_fds()
    with pytest.raises(ShareError, match="shared"):
        Segment(1 << 61)
    assert count_fds() == before


def test_the_last_view_keeps_the_memory_and_then_it_is_unmapped() -> None:
    before = count_fds()
    segment = Segment(8192)
    address = segment.address
    view = segment.tensor(4096, 16).view(torch.int32)[1:3]
    view.fill_(7)
    segment.close()
    segment.close()
    assert segment.closed
    del segment
    gc.collect()
    assert view.tolist() == [7, 7]
    assert _is_mapped(address)
    del view
    gc.collect()
    assert not _is_mapped(address)
    assert count_fds() == before
    assert find_segment(address, 1) is None


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (0, 0), (0, 4097), (4096, 1)])
def test_a_tensor_outside_its_segment_is_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="not inside"):
        Segment(4096).tensor(offset, nbytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_allocate_shared_gives_zeros_of_any_dtype(dtype: torch.dtype) -> None:
    tensor = allocate_shared((3, 5), dtype)
    assert tensor.shape == (3, 5)
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert not tensor.view(torch.uint8).any()
    assert find_segment(tensor.data_ptr(), 15 * dtype.itemsize) is not None


def test_allocate_shared_takes_scalars_and_empties_and_refuses_negative_sizes() -> None:
    assert allocate_shared(()).shape == ()
    assert allocate_shared((0, 3)).shape == (0, 3)
    with pytest.raises(ValueError, match="negative"):
        allocate_shared((2, -1))


def test_rehome_moves_all_views_together_and_keeps_objects_and_values() -> None:
    base = torch.rand(2, 3, 4)
    keys, values, transposed = base[0], base[1], base.permute(2, 0, 1)
    given = [keys, values, transposed]
    ids, strides, copies = [id(t) for t in given], [t.stride() for t in given], [t.clone() for t in given]

    rehome(given)

    assert [id(t) for t in given] == ids
    assert [t.stride() for t in given] == strides
    assert all(torch.equal(now, then) for now, then in zip(given, copies, strict=True))
    assert len({t.untyped_storage().data_ptr() for t in (base, *given)}) == 1
    base[0, 0, 0] = 99.0  # the base, though not given, was moved with its views
    assert keys[0, 0] == 99.0
    assert transposed[0, 0, 0] == 99.0
    segment = find_segment(base.data_ptr(), 96)
    assert segment is not None
    assert segment.nbytes == os.sysconf("SC_PAGESIZE")


def test_rehome_twice_moves_once() -> None:
    tensor = torch.ones(10)
    rehome([tensor, tensor])
    address = tensor.data_ptr()
    rehome([tensor])
    assert tensor.data_ptr() == address
    assert tensor.tolist() == [1.0] * 10


def test_rehome_moves_views_of_other_dtypes_and_inference_tensors() -> None:
    whole = torch.arange(8, dtype=torch.int32)
    halves = whole.view(torch.int16)
    with torch.inference_mode():
        inferred = torch.full((4,), 3.0)
    rehome([whole, halves, inferred])
    whole[1] = 70_000
    assert halves[2:4].tolist() == [70_000 - 65_536, 1]
    assert inferred.tolist() == [3.0] * 4
    assert inferred.is_inference()


def test_rehome_refuses_to_leave_a_view_behind_and_moves_nothing() -> None:
    whole = torch.zeros(16)
    apart = whole.detach()[4:]
    other = torch.zeros(4)
    addresses = [whole.data_ptr(), other.data_ptr()]
    with pytest.raises(ShareError, match="pass all of its views"):
        rehome([other, whole])
    assert [whole.data_ptr(), other.data_ptr()] == addresses
    rehome([whole, apart])
    apart.fill_(2)
    assert whole[4] == 2


def test_rehome_refuses_a_numpy_alias() -> None:
    tensor = torch.zeros(4)
    alias = tensor.numpy()
    with pytest.raises(ShareError, match="NumPy"):
        rehome([tensor])
    del alias
    gc.collect()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, device="meta"),
        torch.zeros(3, requires_grad=True),
        torch.nn.Parameter(torch.zeros(3)),
        torch.eye(3).to_sparse(),
    ],
    ids=["meta", "requires-grad", "parameter", "sparse"],
)
def test_rehome_refuses_what_is_not_plain_cpu_memory(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedMemoryError):
        rehome([tensor])


def test_rehome_leaves_tensors_without_bytes_alone() -> None:
    empty = torch.zeros(0, 4)
    rehome([empty])
    assert empty.shape == (0, 4)
    rehome([])


def test_nothing_is_left_in_dev_shm_when_the_process_is_killed() -> None:
    before = set(os.listdir("/dev/shm"))
    code = (
        "import torch, sys, time\n"
        "from kvferry.ipc.shared_memory import allocate_shared, rehome\n"
        "a = allocate_shared((1024, 1024)); b = torch.ones(1024); rehome([b])\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    assert set(os.listdir("/dev/shm")) <= before


def test_rehome_refuses_memory_that_others_own() -> None:
    array = np.zeros(8, dtype=np.float32)
    buffer = bytearray(32)
    plain = torch.ones(4)
    address = plain.data_ptr()
    for borrowed in (
        torch.from_numpy(array),
        torch.from_numpy(array[:2]),
        torch.frombuffer(buffer, dtype=torch.uint8),
        torch.zeros(8).share_memory_(),  # type: ignore[no-untyped-call]
    ):
        with pytest.raises(ShareError, match="not torch's own"):
            rehome([plain, borrowed])
    assert plain.data_ptr() == address
    # Two storages at one address, the smaller first: neither moves.
    both = [torch.from_numpy(array[:2]), torch.from_numpy(array)]
    with pytest.raises(ShareError):
        rehome(both)
    both[0].fill_(3)
    assert array[:3].tolist() == [3, 3, 0]


def test_rehome_refuses_a_tensor_whose_address_dlpack_gave_away() -> None:
    tensor = torch.zeros(1 << 20)
    alias = np.from_dlpack(tensor)
    with pytest.raises(ShareError, match="DLPack"):
        rehome([tensor])
    del alias
    gc.collect()
    rehome([tensor])


def test_rehome_moves_views_of_views_and_parameters_without_grad() -> None:
    whole = torch.arange(32.0)
    middle = whole[4:28]
    inner = middle.view(4, 6)[1:, 2:]
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    expected = inner.clone()
    rehome([inner, middle, parameter])
    assert torch.equal(inner, expected)
    inner.fill_(-1)
    assert whole[12] == middle[8] == -1
    assert isinstance(parameter, torch.nn.Parameter)
    assert find_segment(parameter.data_ptr(), 12) is not None
    assert find_segment(whole.data_ptr(), 128) is not None
