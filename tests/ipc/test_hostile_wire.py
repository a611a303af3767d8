"""Descriptors made to do harm: more than they seem to ask for, and memory that is not their sender's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from doubles.fake_cuda import FakeDriver, installed
from doubles.host_files import count_fds
from doubles.vmm_pool import VmmPool
from kvferry.cuda.device import bound, device_uuid
from kvferry.cuda.memory import tensor_from_pointer
from kvferry.errors import KVFerryError, MappingBoundsError, ShareError, StaleHandleError, WireError
from kvferry.ipc import wire
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.raw import RawCudaIPCWrapper
from kvferry.ipc.shared_memory import allocate_shared
from kvferry.ipc.table import process_table
from kvferry.ipc.torch_storage import CudaIPCWrapper, TorchStorageDescriptor
from kvferry.ipc.vmm import VmmCudaDescriptor, VmmCudaIPCWrapper

PEER = b"p" * 16


@pytest.fixture
def double() -> Iterator[FakeDriver]:
    with installed() as driver:
        yield driver
        process_table().mappings.drain(20)


def vmm_descriptor(chunks: tuple[int, ...]) -> VmmCudaDescriptor:
    return VmmCudaDescriptor(
        dtype="uint8",
        shape=(1,),
        stride=(1,),
        storage_offset=0,
        device_uuid="GPU-0",
        exporter=PEER,
        buffer_id=1,
        offset=0,
        nbytes=1,
        export_id=b"x" * 16,
        chunks=chunks,
        fabric=(),
    )


def torch_descriptor(**changes: Any) -> TorchStorageDescriptor:
    fields: dict[str, Any] = {
        "dtype": "uint8",
        "shape": (256,),
        "stride": (1,),
        "storage_offset": 0,
        "device_uuid": "GPU-0",
        "exporter": PEER,
        "buffer_id": 1,
        "handle": b"\x02c" + b"h" * 64,
        "storage_bytes": 256,
        "storage_start": 0,
        "counter_file": b"/torch_1_2_3",
        "counter_offset": 3,
        "event_handle": b"",
        "event_sync": False,
    }
    return TorchStorageDescriptor(**{**fields, **changes})


def test_a_few_bytes_cannot_ask_for_millions_of_descriptors() -> None:
    wrappers = [VmmCudaIPCWrapper.from_descriptor(vmm_descriptor((1,) * 65_536)) for _ in range(5)]
    ext = wire.enc_hook(wrappers[0])
    data = msgspec.msgpack.encode({"kvferry": 1, "wrappers": [ext] * 5})
    assert len(data) < 1 << 19
    with pytest.raises(WireError, match="at most 262144"):
        wire.decode_descriptors(data)
    with pytest.raises(ValueError, match="send several"):
        wire.encode_descriptors(wrappers)
    assert len(wire.decode_descriptors(wire.encode_descriptors(wrappers[:4]))) == 4


def test_long_arrays_are_refused_by_their_announced_length() -> None:
    good = msgspec.to_builtins(vmm_descriptor((1,)), builtin_types=(bytes,))
    for field, length in (("chunks", 65_537), ("shape", 17), ("stride", 17)):
        ext = msgspec.msgpack.Ext(1, msgspec.msgpack.encode({**good, field: [1] * length}))
        with pytest.raises(WireError, match="length <="):
            wire.decode_descriptors(msgspec.msgpack.encode({"kvferry": 1, "wrappers": [ext]}))


@pytest.mark.parametrize("offset", [10_000, 1 << 19])
def test_torchs_counter_lies_inside_torchs_file(offset: int) -> None:
    """Torch counts down at the offset without a look at the size of its file, which holds 10,000 counters."""
    torch_descriptor(counter_offset=9_999)
    with pytest.raises(ValueError, match="counter file"):
        torch_descriptor(counter_offset=offset)


@pytest.mark.parametrize(
    "changes",
    [{"storage_bytes": 0, "shape": (0,)}, {"shape": (0,)}, {"shape": (5, 0), "stride": (1, 1)}],
)
def test_a_torch_storage_without_bytes_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        torch_descriptor(**changes)


def test_a_torch_storage_cannot_start_in_another_allocation(
    double: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch adds the start to the address that the handle opens, and asks nobody what lies there."""
    with bound(0) as drv:
        places = sorted(drv.mem_alloc(4096) for _ in range(2))
    theirs, private = places
    tensor_from_pointer(private, 4096, device=0, owner=None).fill_(42)

    def new_shared(*args: Any) -> torch.UntypedStorage:
        return tensor_from_pointer(theirs + args[3], args[2], device=0, owner=None).untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    uuid = device_uuid(0)
    with CudaIPCWrapper.from_descriptor(torch_descriptor(device_uuid=uuid, storage_start=256)) as wrapper:
        assert wrapper.to_tensor().numel() == 256
    process_table().mappings.drain()
    for start, nbytes in ((private - theirs, 256), (4096 - 128, 256)):
        changed = torch_descriptor(
            device_uuid=uuid, storage_start=start, storage_bytes=nbytes, shape=(nbytes,), handle=b"h" * 64
        )
        with CudaIPCWrapper.from_descriptor(changed) as wrapper, pytest.raises(MappingBoundsError):
            wrapper.to_tensor()


def test_our_own_token_reaches_only_what_we_exported_and_only_inside_it(double: FakeDriver) -> None:
    with bound(0) as drv:
        address, private = drv.mem_alloc(4096), drv.mem_alloc(4096)
        private_handle = drv.ipc_get_mem_handle(private)
    with RawCudaIPCWrapper(tensor_from_pointer(address, 4096, device=0, owner=None)[256:512]) as exported:
        good: Any = exported.descriptor
    forged = [
        {"handle": private_handle},
        {"handle": b"\0" * 64},
        {"buffer_id": good.buffer_id + 1},
        {"alloc_size": 1 << 40, "offset": 4096, "nbytes": 256},
        {"alloc_size": 1 << 40, "offset": abs(private - address), "nbytes": 256},
    ]
    for changes in forged:
        descriptor = msgspec.structs.replace(good, **changes)
        with (
            RawCudaIPCWrapper.from_descriptor(descriptor) as wrapper,
            pytest.raises((StaleHandleError, MappingBoundsError)),
        ):
            wrapper.to_tensor()


def test_an_alias_of_virtual_memory_needs_every_chunk_to_be_there(double: FakeDriver) -> None:
    pool = VmmPool(3 * (2 << 20))
    with VmmCudaIPCWrapper(pool.tensor()) as exported:
        descriptor = exported.descriptor
        last = pool.base + 2 * (2 << 20)
        with bound(0) as drv:
            drv.mem_unmap(last, 2 << 20)
            handle = drv.mem_create(2 << 20, 0)
            drv.mem_map(last, 2 << 20, handle)
            drv.mem_release(handle)
            drv.set_access(last, 2 << 20, 0)
        with VmmCudaIPCWrapper.from_descriptor(descriptor) as wrapper, pytest.raises(StaleHandleError, match="chunk"):
            wrapper.to_tensor()
    pool.close()


def test_structured_nonsense_in_every_kind_is_one_error(double: FakeDriver) -> None:
    """Thousands of descriptors, each with a few fields of any kind set to values at the edges."""
    numbers = [-1, 0, 1, 2, 7, 63, 64, 2**31, 2**32, 2**53, 2**62 - 1, 2**62, 2**63 - 1, 2**64 - 1, -(2**63)]
    others: list[Any] = [None, True, 1.0, float("nan"), float("inf"), "", "uint8", b"", b"h" * 64, PEER, [], {}]
    lists: list[Any] = [[1] * 17, [2**62, 2**62], [0], [-1], [2**64 - 1] * 16, [1.0], [[1]], ["1"], [b"f" * 64]]
    with HostIPCWrapper(allocate_shared((8,), torch.uint8)) as host:
        kinds: list[Any] = [host.descriptor, vmm_descriptor((4096,)), torch_descriptor()]
        goods = [msgspec.to_builtins(kind, builtin_types=(bytes,)) for kind in kinds]
    chance = random.Random(5)
    before = count_fds()
    for _ in range(4000):
        fields = dict(chance.choice(goods))
        for name in chance.sample(sorted(fields), chance.randint(1, 3)):
            fields[name] = chance.choice([*numbers, *others, *lists])
        ext = msgspec.msgpack.Ext(1, msgspec.msgpack.encode(fields))
        try:
            wrappers = wire.decode(msgspec.msgpack.encode({"kvferry": 1, "wrappers": [ext]}))
            for wrapper in wrappers:
                with wrapper:
                    wrapper.to_tensor()
        except KVFerryError:
            pass
    assert count_fds() == before


def test_numbers_that_are_no_descriptors_are_one_error() -> None:
    with HostIPCWrapper(allocate_shared((8,), torch.uint8)) as wrapper:
        data = wire.encode_descriptors([wrapper, wrapper])
        before = count_fds()
        good = wrapper.export_fd(0)
        with pytest.raises(ShareError, match="Bad file descriptor"):
            wire.decode(data, [1 << 20, good])  # and the good one is closed
        with pytest.raises(ShareError, match="Bad file descriptor"):
            wire.decode(data, [wrapper.export_fd(0), 1 << 20])
        assert count_fds() == before
