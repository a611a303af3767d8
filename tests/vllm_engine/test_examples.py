"""The examples run, with a tiny model that has a tokenizer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_engine import models
from vllm_engine.stage import Stage

EXAMPLES = Path(__file__).parents[2] / "examples" / "vllm"


def run(name: str, *arguments: str) -> list[int]:
    """How many tokens each answer reused."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [int(count) for count in re.findall(r"(\d+) (?:of \d+ )?prompt tokens reused", done.stdout)]


@pytest.mark.full
@pytest.mark.parametrize("name", ["one_engine.py", "two_engines.py"])
def test_example(stage: Stage, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM takes nearly all memory
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # compiles less
    model = models.with_tokenizer(models.llama(tmp_path / "talking"))
    server = stage.serve()
    first, second = run(name, str(model), server.url)
    assert first == 0
    assert second > 1000
