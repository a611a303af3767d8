"""What a user sets, and the name under which KV is shared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.sglang.identity import RankIdentity, model_name
from kvferry.connectors.sglang.settings import HICACHE_KEYS, SGLangSettings

WHERE = "--the-flag"


def settings(**extra: Any) -> SGLangSettings:
    return SGLangSettings.from_extra_config(extra, where=WHERE, foreign=HICACHE_KEYS)


def test_sglangs_own_keys_are_left_alone() -> None:
    found = settings(url="unix:///kv", interface_v1=1, module_path="m", allocator="shm", disk_wait_s=0)
    assert (found.url, found.disk_wait_s, found.answer_timeout_s) == ("unix:///kv", 0, 2.0)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, r'put "url": "unix:///run/kvferry.sock" into --the-flag'),
        ({"url": "u", "modle_id": "m"}, "did you mean 'model_id'"),
        ({"url": "u", "load_timeout_s": 0}, "--the-flag: .*load_timeout_s"),
        ({"url": "u", "staging_bytes": 1}, "--the-flag: .*staging_bytes"),
        ({"url": 5}, "--the-flag: Expected `str`"),
    ],
)
def test_mistakes_are_named(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(**extra)


def test_a_token_comes_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("me:secret\n")
    assert settings(url="u", token_file=str(path)).token() == "me:secret"
    assert settings(url="u").token() is None
    with pytest.raises(ValueError, match="token_file of KVferry"):
        settings(url="u", token_file=str(tmp_path / "none")).token()


ARGS: dict[str, Any] = {"model_path": "/models/m", "dtype": "bfloat16", "kv_cache_dtype": "auto", "load_format": "auto"}
RANK: dict[str, Any] = {"tp_rank": 0, "tp_size": 2}


def name(rank: dict[str, Any] | None = None, model_id: str = "m@1", layers: str = "0-3 of 3", **args: Any) -> str:
    return model_name(
        SimpleNamespace(**(ARGS | args)),
        RankIdentity(**(rank or RANK)),
        model_id=model_id,
        release="0.5.23",
        engine_id="e",
        layers=layers,
    )


def test_all_that_decides_the_bytes_is_in_the_name() -> None:
    others = [
        name(),
        name(model_id="m@2"),
        name(layers="3-6 of 3"),
        name(kv_cache_dtype="fp8_e4m3"),
        name(dtype="float16"),
        name(quantization="fp8"),
        name(quantization_param_path="/scales.json"),
        name(torchao_config="int4wo-128"),
        name(model_impl="transformers"),
        name({"tp_rank": 1, "tp_size": 2}),
        name({"tp_rank": 0, "tp_size": 4}),
        name({"tp_rank": 0, "tp_size": 2, "pp_rank": 1, "pp_size": 2}),
        name({"tp_rank": 0, "tp_size": 2, "cp_rank": 1, "cp_size": 2}),
    ]
    assert len(set(others)) == len(others)
    assert name() == name()
    assert name().startswith("sglang/m@1/")


def test_adapters_are_what_they_are_and_not_where(tmp_path: Path) -> None:
    """SGLang's page hashes have an adapter's name and path, which stay when it is trained again."""
    adapter = tmp_path / "a"
    adapter.mkdir()
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    given: list[Any] = [
        [SimpleNamespace(lora_name="a", lora_path=str(adapter))],
        [{"lora_name": "a", "lora_path": str(adapter)}],
        [f"a={adapter}"],
        [str(adapter)],
        {"a": str(adapter)},
    ]
    before = {name(lora_paths=paths) for paths in given}
    assert len(before) == 1
    weights.write_bytes(b"another")
    assert name(lora_paths=given[0]) not in {*before, name(), name(lora_paths=[])}
    assert name(lora_paths=[]) == name()


def test_an_adapter_that_nobody_can_name_is_shared_with_nobody(caplog: pytest.LogCaptureFixture) -> None:
    args = SimpleNamespace(**ARGS, lora_paths=["a=nobody/nothing"])
    names = [
        model_name(args, RankIdentity(0, 1), model_id="m@1", release="r", engine_id=engine_id) for engine_id in "ab"
    ]
    assert names[0] != names[1]
    assert "the LoRA adapter nobody/nothing" in caplog.text


def test_scales_are_what_the_file_says(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    before = name(quantization_param_path=str(scales))
    scales.write_text('{"k": 2}')
    assert name(quantization_param_path=str(scales)) != before


def test_ranks_that_have_the_same_share_it_and_one_writes() -> None:
    ranks: list[dict[str, Any]] = [{"tp_rank": rank, "tp_size": 4, "shared": True} for rank in range(4)]
    assert len({name(rank) for rank in ranks}) == 1
    assert [RankIdentity(**rank).writes for rank in ranks] == [True, False, False, False]
    assert name(ranks[0]) != name({"tp_rank": 0, "tp_size": 4})
    assert RankIdentity(3, 4).writes


def test_weights_that_nobody_can_name_are_shared_with_nobody(caplog: pytest.LogCaptureFixture) -> None:
    one = model_name(SimpleNamespace(**ARGS), RankIdentity(0, 1), model_id="", release="r", engine_id="a")
    other = model_name(SimpleNamespace(**ARGS), RankIdentity(0, 1), model_id="", release="r", engine_id="b")
    assert one != other
    assert "set model_id" in caplog.text
    assert name(model_id="", load_format="dummy") != name()
