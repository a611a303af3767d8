"""The name under which engines share KV, and TensorRT-LLM where it is there, is older, or is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doubles.trt_fixtures import write_model
from doubles.trt_interface import NEW, OLD, KvCacheConnectorScheduler, KvCacheConnectorWorker, installed
from doubles.trt_requests import Setup, llm_args
from kvferry.connectors.trtllm import interface
from kvferry.connectors.trtllm.identity import model_name
from kvferry.connectors.trtllm.model import read_config


def name_of(model: str, *, model_id: str = "", release: str = "1.2", engine_id: str = "e", **changes: Any) -> str:
    args = llm_args(model, Setup(), **changes)
    return model_name(args, read_config(model, ""), model_id=model_id, release=release, engine_id=engine_id)


def test_what_decides_the_bytes_is_in_the_name(tmp_path: Path) -> None:
    model = write_model(tmp_path / "llama")
    name = name_of(model)
    assert name.startswith("trtllm/llama/")
    assert name_of(model, engine_id="other") == name
    others = [
        name_of(write_model(tmp_path / "other", rope_theta=5e5)),
        name_of(model, release="1.3"),
        name_of(model, attn_backend="FLASHINFER"),
        name_of(model, dtype="float16"),
        name_of(model, kv_dtype="fp8"),
        name_of(model, model_kwargs={"rope_theta": 5e5}),
        name_of(model, model_kwargs={"rope_theta": 1e6}),
        name_of(model, checkpoint_format="mistral"),
        name_of(model, quant_config=SimpleNamespace(quant_algo="FP8", kv_cache_quant_algo=None)),
        name_of(model, model_id="mine"),
    ]
    assert len({name, *others}) == len(others) + 1
    weights = Path(model) / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert name_of(model) != name
    assert name_of(model, model_id="mine") == others[-1]


def test_length_dependent_positions_are_in_the_name(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain")
    scaled = write_model(tmp_path / "scaled", rope_scaling={"type": "dynamic"})
    assert name_of(plain, max_seq_len=100) == name_of(plain, max_seq_len=200)
    assert name_of(scaled, max_seq_len=100) != name_of(scaled, max_seq_len=200)


def test_weights_that_nothing_names_are_the_engines_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    assert name_of(model) != name_of(model, engine_id="other")
    assert "KVFERRY_TRTLLM_MODEL_ID" in caplog.text
    assert name_of(model, model_id="a") == name_of(model, model_id="a", engine_id="other")
    full = write_model(tmp_path / "full")
    assert name_of(full, load_format="dummy") != name_of(full, load_format="dummy", engine_id="other")


@pytest.mark.parametrize(("version", "release"), [(OLD, "1.2"), (NEW, "1.4")])
def test_either_module_path(version: str, release: str) -> None:
    with installed(version) as stub:
        assert interface.base_class("KvCacheConnectorScheduler") is KvCacheConnectorScheduler
        assert interface.release() == release
        from kvferry.connectors.trtllm import KVFerryScheduler, KVFerryWorker

        assert issubclass(KVFerryScheduler, KvCacheConnectorScheduler)
        assert issubclass(KVFerryWorker, KvCacheConnectorWorker)
        ranks = stub.communicator(2)
        args = SimpleNamespace()
        assert ranks.on_all(lambda rank: interface.rank_and_size()) == [(0, 2), (1, 2)]
        ids = ranks.on_all(lambda rank: interface.shared_engine_id(args, 2))
        assert ids == [interface.own_engine_id(args)] * 2
        ranks.close()


def test_without_tensorrt_llm_the_classes_are_plain_ones() -> None:
    """In a process of its own, which imports neither it nor anything of vLLM's."""
    text = (
        "import sys; from kvferry.connectors.trtllm import KVFerryScheduler, KVFerryWorker; "
        "from kvferry.connectors.trtllm import interface; "
        "print(KVFerryScheduler.__mro__[1:], interface.rank_and_size(), interface.release() == '', "
        "[name for name in sys.modules if name.startswith(('tensorrt_llm', 'vllm', 'kvferry.connectors.vllm'))])"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.strip() == "(<class 'object'>,) (0, 1) True []"


def test_there_is_nothing_else_in_the_package() -> None:
    from kvferry.connectors import trtllm

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        trtllm.Nothing  # noqa: B018
