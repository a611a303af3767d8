from __future__ import annotations

import pytest

from kvferry.errors import NcclError
from kvferry.p2p.nccl import NcclSettings
from kvferry.p2p.nccl.settings import check_environment, launches_ahead


@pytest.mark.parametrize(("ctas", "mib"), [(4, 28 + 40), (8, 52 + 80), (16, 100 + 160)])
def test_published_memory_is_what_was_measured(ctas: int, mib: int) -> None:
    """At init and at the first transfer, NCCL 2.28.9 on H200s."""
    assert NcclSettings(max_ctas=ctas, max_communicators=8).bytes_per_peer == mib << 20


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_ctas": 0},
        {"max_communicators": 0},
        {"max_ctas": 16, "max_communicators": 9},
        {"connect_timeout_s": 0.0},
        {"end_timeout_s": -1.0},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        NcclSettings(**wrong)  # type: ignore[arg-type]


def test_nccl_that_is_told_to_block_is_refused() -> None:
    check_environment({})
    check_environment({"NCCL_COMM_BLOCKING": "0"})
    with pytest.raises(NcclError, match="NCCL_COMM_BLOCKING=1"):
        check_environment({"NCCL_COMM_BLOCKING": "1"})


def test_nothing_is_launched_ahead_where_streams_share_a_hardware_queue() -> None:
    assert launches_ahead({}) == 2
    assert launches_ahead({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}) == 2
    assert launches_ahead({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}) == 1
    assert launches_ahead({"CUDA_DEVICE_MAX_CONNECTIONS": "nonsense"}) == 1
