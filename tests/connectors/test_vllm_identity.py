"""Names of weights: equal where the weights are, and only there."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.vllm.identity import lora_name, model_name
from kvferry.connectors.vllm.keys import NotExpressible
from kvferry.connectors.weights import files_digest, weights_name


def checkpoint(folder: Path, fill: bytes = b"w", size: int = 200_000) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(fill * size)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    return folder


def config(model: str, **changes: Any) -> Any:
    hf = {"hidden_size": 8, "transformers_version": "5", **changes.pop("hf", {})}
    fields = {
        "model": model,
        "revision": None,
        "dtype": "torch.float32",
        "quantization": None,
        "seed": 0,
        "max_model_len": 100,
        **changes,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: hf), **fields),
        cache_config=SimpleNamespace(cache_dtype=fields.get("cache_dtype", "auto")),
        load_config=SimpleNamespace(load_format=fields.get("load_format", "auto")),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(engine_id=fields.get("engine_id", "e")),
    )


def name(config: Any, **settings: str) -> str:
    return model_name(config, **{"model_id": "", "engine": "0.32/FLASH", **settings})


def test_one_checkpoint_has_one_name_wherever_it_lies(tmp_path: Path) -> None:
    here, there = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b" / "a")
    assert files_digest(here) == files_digest(there)
    assert name(config(str(here))) == name(config(str(there)))
    assert name(config(str(here))).startswith("vllm/a/")


def test_a_checkpoint_written_anew_has_another_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a")
    before = files_digest(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(100_001)
        file.write(b"x")  # between the samples
    assert files_digest(folder) != before


@pytest.mark.parametrize("changed", ["tokenizer.json", "README.md", "generation_config.json"])
def test_what_is_no_weight_does_not_count(tmp_path: Path, changed: str) -> None:
    folder = checkpoint(tmp_path / "a")
    before = files_digest(folder)
    (folder / changed).write_text("other")
    assert files_digest(folder) == before


def test_files_in_the_hub_cache_are_named_by_their_content(tmp_path: Path) -> None:
    """Links into `blobs`, where a file's name is its hash; times do not count."""
    digests = []
    for host in ("a", "b"):
        blobs, snapshot = tmp_path / host / "blobs", tmp_path / host / "snapshots" / "abc"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (blobs / "0123").write_bytes(b"w")
        (snapshot / "model.safetensors").symlink_to(blobs / "0123")
        digests.append(files_digest(snapshot))
    assert digests[0] == digests[1]


def test_everything_that_decides_kv_is_in_the_name(tmp_path: Path) -> None:
    path = str(checkpoint(tmp_path / "a"))
    other = str(checkpoint(tmp_path / "o", b"v"))
    long = {"rope_parameters": {"rope_type": "longrope"}}
    names = [
        name(config(path)),
        name(config(other)),
        name(config(path, dtype="torch.bfloat16")),
        name(config(path, quantization="fp8")),
        name(config(path, cache_dtype="fp8")),
        name(config(path, load_format="dummy")),
        name(config(path, load_format="dummy", seed=1)),
        name(config(path, hf={"rope_theta": 1e6})),
        name(config(path, hf=long)),
        name(config(path, hf=long, max_model_len=200)),
        name(config(path), engine="0.33/FLASH"),
        name(config(path), model_id="mine"),
        name(config(path), model_id="other"),
    ]
    assert len(set(names)) == len(names)
    assert all(len(found) < 512 for found in names)


def test_what_does_not_decide_kv_is_not(tmp_path: Path) -> None:
    path = str(checkpoint(tmp_path / "a"))
    assert name(config(path)) == name(config(path, max_model_len=200, hf={"transformers_version": "6"}))


def test_a_users_own_name_stands_for_the_weights(tmp_path: Path) -> None:
    here, there = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", b"v")
    assert name(config(str(here)), model_id="mine") == name(config(str(there)), model_id="mine")


def test_weights_that_nothing_names_are_shared_with_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """What lies in a bucket may be other weights tomorrow."""
    one, other = (config("s3://bucket/model", engine_id=engine) for engine in "ab")
    assert name(one) == name(config("s3://bucket/model", engine_id="a"))  # all ranks of an engine
    assert name(one) != name(other)
    assert name(one, model_id="mine") == name(other, model_id="mine")
    assert "set model_id" in caplog.text


def test_a_commit_names_its_content() -> None:
    assert weights_name("org/model", "0" * 40) == "commit:org/model@" + "0" * 40
    assert weights_name("org/model", "main") is None


def test_one_file_is_named_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"1" * 1000)
    before = weights_name(str(file), "")
    file.write_bytes(b"2" * 1000)
    assert weights_name(str(file), "") not in (before, None)


def test_an_adapter_is_named_by_its_weights(tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"1" * 100)
    before = lora_name(1, "a", str(folder), "")
    assert lora_name(2, "a", str(folder), "") == before
    weights.write_bytes(b"2" * 100)
    assert lora_name(3, "a", str(folder), "") != before
    with pytest.raises(NotExpressible):
        lora_name(4, "a", "s3://bucket/lora", "")
