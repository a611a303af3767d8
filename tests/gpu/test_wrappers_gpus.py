"""Wrappers on machines with two GPUs: UUIDs, orders, current devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from doubles.child import Child, ChildError
from doubles.importing import check_nothing_mapped, opened, received
from doubles.side import digest
from kvferry.cuda.device import device_uuid

pytestmark = pytest.mark.gpu

MIB = 1 << 20
GIB = 1 << 30
_NUM_GPUS = torch.cuda.device_count()
two_gpus = pytest.mark.skipif(_NUM_GPUS < 2, reason=f"needs 2 GPUs, sees {_NUM_GPUS}")


@pytest.fixture(autouse=True)
def nothing_stays_mapped() -> Iterator[None]:
    yield
    check_nothing_mapped()


@two_gpus
def test_another_gpu_is_found_by_its_uuid() -> None:
    """The exporter sees one GPU only, as its number 0; here it is number 1."""
    with Child(fake=False, env={"CUDA_VISIBLE_DEVICES": device_uuid(1)}) as child:
        child.call("alloc", name="pool", nbytes=4 * MIB)
        exported = child.call("wrap", name="w", memory="pool", start=MIB, dtype="bfloat16", shape=[4096], seed=8)
        with opened(exported) as wrapper:
            tensor = wrapper.to_tensor()
            assert tensor.device == torch.device("cuda", 1)
            assert torch.cuda.current_device() == 0
            assert digest(tensor) == exported["digest"]
            assert digest(tensor.to("cuda:0")) == exported["digest"]
            del tensor


@two_gpus
def test_gpus_in_another_order_and_gpus_that_are_hidden() -> None:
    first, second = device_uuid(0), device_uuid(1)
    with (
        Child(fake=False, env={"CUDA_VISIBLE_DEVICES": f"{first},{second}"}) as maker,
        Child(fake=False, env={"CUDA_VISIBLE_DEVICES": f"{second},{first}"}) as turned,
        Child(fake=False, env={"CUDA_VISIBLE_DEVICES": first}) as blind,
    ):
        maker.call("alloc", name="pool", nbytes=4 * MIB, device=1)
        exported = maker.call("wrap", name="w", memory="pool", start=0, dtype="float16", shape=[64], seed=1)
        seen = turned.call("open", name="w", kind="raw", packed=exported["packed"])
        assert (seen["device"], seen["digest"]) == (0, exported["digest"])
        turned.call("close", name="w")
        with pytest.raises(ChildError, match=second) as caught:
            blind.call("open", name="w", kind="raw", packed=exported["packed"])
        assert caught.value.kind == "UnknownDeviceError"
        blind.call("close", name="w")


@two_gpus
@pytest.mark.parametrize("kind", ["legacy", "vmm"])
def test_memory_of_gpu_0_while_gpu_1_is_current(kind: str) -> None:
    with Child(fake=False) as child, torch.cuda.device(1):
        torch.zeros(1, device="cuda:1")
        child.call("alloc", name="pool", nbytes=4 * MIB, kind=kind)
        how = "raw" if kind == "legacy" else "vmm"
        exported = child.call("wrap", name="w", memory="pool", start=0, dtype="uint8", shape=[64], wrapper=how)
        wrapper = received(child, "w", exported)
        tensor = wrapper.to_tensor()
        assert tensor.device.index == 0
        assert torch.cuda.current_device() == 1
        assert digest(tensor) == exported["digest"]
        del tensor
        wrapper.close()
