"""How much of engines' memory the server says it holds: by device, and none of what a dead engine had."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.process import Stage, Zygote, eventually


@pytest.mark.parametrize(
    ("double", "device", "prefix"), [(False, "cpu", "held_bytes_cpu"), (True, "double", "held_bytes_GPU-")]
)
def test_what_is_held_is_told_until_it_is_unmapped(
    zygote: Zygote, tmp_path: Path, double: bool, device: str, prefix: str
) -> None:
    stage = Stage(zygote, tmp_path, double=double, device="cuda" if double else "cpu")
    try:
        watcher = stage.engine(register={})

        def held() -> dict[str, float]:
            return {name: value for name, value in watcher.call("stats")["stats"].items() if name.startswith("held_")}

        assert held() == {}
        engines = [stage.engine(register={"engine_id": name}, device=device) for name in "ab"]
        ((name, two),) = held().items()
        assert name.startswith(prefix)
        assert watcher.call("stats")["stats"]["mapped_bytes"] >= two > 0
        engines[0].kill()
        eventually(lambda: held() == {name: two / 2}, 5)
        engines[1].call("unregister")
        assert held() == {}
        eventually(lambda: watcher.call("stats")["stats"]["mapped_bytes"] == 0, 5)
    finally:
        stage.close()
