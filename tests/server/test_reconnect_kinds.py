"""Memory of each kind goes to one server after the other: its handles and descriptors are given again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from doubles.fake_cuda import installed
from doubles.vmm_pool import VmmPool
from kvferry.cuda.device import bound
from kvferry.cuda.memory import tensor_from_pointer
from kvferry.ipc import IPCPolicy, allocate_shared
from serving.process import Stage, Zygote
from serving.reconnecting import NUM_BYTES, check_reconnects


@pytest.fixture(params=["host", "raw", "vmm"])
def flat(request: pytest.FixtureRequest) -> Iterator[torch.Tensor]:
    """Bytes of that kind, on the host or over the driver's double."""
    if request.param == "host":
        yield allocate_shared((NUM_BYTES,), torch.uint8)
        return
    with installed():
        if request.param == "raw":
            with bound(0) as driver:
                address = driver.mem_alloc(NUM_BYTES)
            yield tensor_from_pointer(address, NUM_BYTES, device=0, owner=None)
            return
        pool = VmmPool(NUM_BYTES)
        yield pool.tensor()
        pool.close()


@pytest.mark.parametrize("isolated_ipc", [False, True])
def test_one_server_after_the_other(zygote: Zygote, tmp_path: Path, flat: torch.Tensor, isolated_ipc: bool) -> None:
    stage = Stage(zygote, tmp_path, device="cuda", double=True)
    try:
        check_reconnects(stage, flat, IPCPolicy(isolated_ipc=isolated_ipc))
    finally:
        stage.close()
