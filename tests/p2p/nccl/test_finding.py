"""Where the library is looked for, each case in a process of its own, since what is loaded stays loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SAY = """
import sys
if {hide}: sys.modules["nvidia"] = None
import torch
if {rocm}: torch.version.hip = "6.0"
from kvferry import find_nccl_library, NcclError
try: print("found", find_nccl_library())
except NcclError as error: print(type(error).__name__, error)
"""


def said(env: dict[str, str], *, hide_wheel: bool = True, rocm: bool = False) -> str:
    cleared = {"KVFERRY_NCCL_SO_PATH": "", "VLLM_NCCL_SO_PATH": ""}
    command = [sys.executable, "-c", SAY.format(hide=hide_wheel, rocm=rocm)]
    done = subprocess.run(
        command, env={**os.environ, **cleared, **env}, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def wheel(nccl_so: Path, tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with a wheel's file in it."""
    file = tmp_path / "site" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    file.parent.mkdir(parents=True)
    shutil.copy(nccl_so, file)
    return file


def site(wheel: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(wheel.parents[3]), os.environ.get("PYTHONPATH", "")])}


def test_our_variable_goes_before_vllms_and_that_before_the_wheel(nccl_so: Path, wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    shutil.copy(nccl_so, other)
    both = {"KVFERRY_NCCL_SO_PATH": str(nccl_so), "VLLM_NCCL_SO_PATH": str(other), **site(wheel)}
    assert said(both, hide_wheel=False) == f"found {nccl_so}"
    assert said({**both, "KVFERRY_NCCL_SO_PATH": ""}, hide_wheel=False) == f"found {other}"


def test_the_wheels_file_goes_before_what_the_loader_finds(nccl_so: Path, wheel: Path, tmp_path: Path) -> None:
    shutil.copy(nccl_so, tmp_path / "libnccl.so.2")
    env = {"LD_LIBRARY_PATH": str(tmp_path)}
    assert said({**env, **site(wheel)}, hide_wheel=False) == f"found {wheel}"
    assert said(env) == "found libnccl.so.2"


def test_the_wheel_of_another_layout_is_found(wheel: Path) -> None:
    moved = wheel.parents[2] / "cu13" / "lib" / "libnccl.so.2"
    moved.parent.mkdir(parents=True)
    wheel.rename(moved)
    assert said(site(wheel), hide_wheel=False) == f"found {moved}"


def test_a_torch_for_rocm_takes_rccl_and_no_wheel(nccl_so: Path, wheel: Path, tmp_path: Path) -> None:
    shutil.copy(nccl_so, tmp_path / "librccl.so.1")
    env = {"LD_LIBRARY_PATH": str(tmp_path), **site(wheel)}
    assert said(env, hide_wheel=False, rocm=True) == "found librccl.so.1"


def test_without_any_all_that_was_tried_is_told() -> None:
    text = said({})
    assert text.startswith("NcclLibraryError no NCCL library can be loaded")
    for tried in ("KVFERRY_NCCL_SO_PATH", "VLLM_NCCL_SO_PATH", "nvidia-nccl-cu12 or nvidia-nccl-cu13", "libnccl.so.2"):
        assert tried in text


@pytest.mark.parametrize("variable", ["KVFERRY_NCCL_SO_PATH", "VLLM_NCCL_SO_PATH"])
def test_a_variable_that_names_no_library_is_an_error_and_not_gone_on_from(
    variable: str, wheel: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    for path in (text, tmp_path / "missing.so"):
        answer = said({variable: str(path), **site(wheel)}, hide_wheel=False)
        assert answer.startswith(f"NcclLibraryError {variable} is set to {path}, which cannot be loaded")
