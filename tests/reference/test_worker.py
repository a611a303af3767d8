"""An engine in its own process: driven, refused, killed."""

from __future__ import annotations

import pathlib
import random
import time

import msgspec
import pytest

from kvferry.cli.children import ServerProcess
from kvferry.errors import DeadlineError
from kvferry.reference import EngineConfig, EngineProcess, PagedConfig
from kvferry.reference.worker import Exit, Generate, Init, Lookup, Prefill, Stats, Store
from reference.small import SMALL_MODEL

CONFIG = EngineConfig(SMALL_MODEL, PagedConfig(num_blocks=64))
TOKENS = [random.Random(0).randrange(SMALL_MODEL.vocab_size) for _ in range(200)]


def test_kv_outlives_the_engine_that_made_it(tmp_path: pathlib.Path) -> None:
    with ServerProcess(tmp_path / "s", 64 << 20, "cpu") as server:
        with EngineProcess("A") as first:
            ready = first.call(Init(engine=CONFIG, engine_id="A", server=server.url))
            assert ready["kv_bytes"] == 64 * 16 * 3 * 2 * 2 * 16 * 4
            prefill = first.call(Prefill(tokens=TOKENS))
            assert first.call(Store(request=prefill["request"]))["stored_tokens"] == 192
            assert first.call(Lookup(tokens=TOKENS))["tokens"] == 192
            assert first.call(Stats())["server"]
            first.kill()
        with EngineProcess("B") as second:
            second.call(Init(engine=CONFIG, engine_id="B", server=server.url))
            reused = second.call(Generate(tokens=TOKENS, max_new_tokens=6, reuse=True))
            cold = second.call(Generate(tokens=TOKENS, max_new_tokens=6))
            assert reused["reused_tokens"] == 192
            assert reused["tokens"] == cold["tokens"]
            assert reused["tokens"][0] == prefill["first_token"]
            second.call(Exit())


def test_refusals_name_the_reason_and_the_engine_goes_on() -> None:
    with EngineProcess("C") as engine:
        for command, text in (
            (Prefill(tokens=[1]), "send init first"),
            (Lookup(tokens=[1]), "init with `server`"),
            (msgspec.defstruct("Odd", [("x", int)], tag_field="command", tag="dance")(1), "dance"),
            (Init(engine=CONFIG, server="unix:///nowhere/at/all"), "/nowhere/at/all"),
        ):
            with pytest.raises(ChildProcessError, match=text):
                engine.call(command)
        engine.call(Init(engine=CONFIG))
        with pytest.raises(ChildProcessError, match="no kept request 'x'"):
            engine.call(Store(request="x"))
        assert len(engine.call(Generate(tokens=[1, 2], max_new_tokens=3))["tokens"]) == 3
        with pytest.raises(DeadlineError, match="no answer in time"):
            engine.call(Generate(tokens=[1, 2], max_new_tokens=1000), timeout_s=0.01)
        engine.kill()
        engine.kill()
        assert "ended with -9" in repr(engine)


def test_it_ends_by_itself_when_its_driver_is_gone() -> None:
    engine = EngineProcess("D")
    engine.call(Init(engine=CONFIG))
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 8
    assert "ended with 0" in repr(engine)
    with pytest.raises(ValueError, match="closed"):
        engine.call(Exit())
