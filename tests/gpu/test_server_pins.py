"""The server's memory, pinned, and engines' memory, held, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cuda.device import visible_uuids
from kvferry.errors import ShareError
from kvferry.server.memory import Memory
from kvferry.server.work.device_cuda import CudaDevice
from serving.process import Stage, Zygote, eventually

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

NBYTES = 1 << 20


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


def test_memory_that_cannot_be_pinned_is_told_with_the_limits() -> None:
    memory = Memory(NBYTES)
    device = CudaDevice(visible_uuids()[0])
    try:
        device.prepare(memory.address, NBYTES)
        with pytest.raises(ShareError, match=r"1048576 bytes of memory cannot be pinned: cuMemHostRegister.*memlock"):
            device.prepare(memory.address, NBYTES)  # what is pinned already is refused by the driver
    finally:
        device.close()
        memory.close()


def test_what_is_held_is_told_by_the_gpus_uuid(zygote: Zygote, tmp_path: Path) -> None:
    stage = Stage(zygote, tmp_path, device="cuda", memory_bytes=64 << 20)
    try:
        watcher = stage.engine(register={})
        engine = stage.engine(register={"engine_id": "a"}, device="cuda:0")
        name = f"held_bytes_{visible_uuids()[0]}"
        assert watcher.call("stats")["stats"][name] > 0
        engine.kill()
        eventually(lambda: name not in watcher.call("stats")["stats"], 5)
    finally:
        stage.close()
