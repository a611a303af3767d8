"""`kvferry demo --p2p` on GPUs: on one, and where there are two, from one to the other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

_NUM_GPUS = torch.cuda.device_count()
_TWO = pytest.mark.skipif(_NUM_GPUS < 2, reason=f"needs 2 GPUs, sees {_NUM_GPUS}")


@pytest.mark.parametrize(("wanted", "carrier"), [("auto", "ipc"), pytest.param("nccl", "nccl", marks=_TWO)])
def test_the_demo_keeps_its_promises_on_cuda(wanted: str, carrier: str) -> None:
    command = [sys.executable, "-m", "kvferry", "demo", "--p2p", "--device", "cuda", "--prompt-tokens", "2000"]
    done = subprocess.run(
        [*command, "--carrier", wanted, "--json"], capture_output=True, text=True, timeout=190, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads(done.stdout)
    assert (result["backend"], result["carrier"]) == ("cuda", carrier)
    assert result["devices"] == ["cuda:0", "cuda:1" if _NUM_GPUS > 1 else "cuda:0"]
    assert (result["tokens_equal"], result["control_equal"], result["killed_tokens_equal"]) == (True, False, True)
    assert result["received_tokens"] == result["control_received_tokens"] == 1984
    assert 0 < result["killed_learned_ms"] < 6000
