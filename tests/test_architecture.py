"""The table of parts in ARCHITECTURE.md: which may import which."""

from __future__ import annotations

import ast
import pathlib
import re
import shutil
import subprocess
import sys

SOURCE = pathlib.Path(__file__).parents[1] / "src" / "kvferry"
PARTS = sorted(p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__")
OPEN_TO_ALL = {"errors", "config", "settings"}

MAY_IMPORT = {
    "cuda": set(),
    "layout": set(),
    "ipc": {"cuda"},
    "copy": {"cuda", "ipc", "layout"},
    "cache": {"layout"},
    "protocol": {"ipc", "layout"},
    "server": {"cuda", "layout", "ipc", "copy", "cache", "protocol"},
    "client": {"ipc", "layout", "protocol"},
    "p2p": {"cuda", "ipc", "layout", "copy"},
    "reference": {"client", "p2p", "layout"},
    "connectors": {"client", "p2p", "ipc", "layout"},
    "router": set(),
    "cli": set(PARTS),
}


def imported_parts(path: pathlib.Path) -> set[str]:
    """Parts of kvferry that a file imports, wherever in the file it does so."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {n.split(".")[1] for n in names if n.startswith("kvferry.") and n.count(".")}


def test_every_part_has_a_row() -> None:
    assert set(MAY_IMPORT) == set(PARTS)


def test_no_part_imports_what_its_row_does_not_allow() -> None:
    for part in PARTS:
        for path in (SOURCE / part).rglob("*.py"):
            extra = imported_parts(path) - MAY_IMPORT[part] - OPEN_TO_ALL - {part, "__version__"}
            assert not extra, f"{path} imports {sorted(extra)}"


def test_import_contracts_hold() -> None:
    tool = shutil.which("lint-imports", path=str(pathlib.Path(sys.executable).parent))
    assert tool, "import-linter is not installed beside this Python"
    command = [tool, "--no-cache"]
    run = subprocess.run(command, cwd=SOURCE.parents[1], capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_cuda_is_the_only_part_that_loads_the_driver() -> None:
    pattern = re.compile(r"libcuda|libnvrtc|cuda\.bindings")
    for part in PARTS:
        if part == "cuda":
            continue
        for path in (SOURCE / part).rglob("*.py"):
            assert not pattern.search(path.read_text(encoding="utf-8")), path


def test_nothing_unpickles_evaluates_or_starts_a_shell() -> None:
    pattern = re.compile(r"\bpickle\b.*import|import\s+pickle|\beval\(|\bexec\(|shell=True|os\.system")
    for path in SOURCE.rglob("*.py"):
        assert not pattern.search(path.read_text(encoding="utf-8")), path


def test_files_and_functions_stay_small() -> None:
    """House rule: files under 300 lines, functions under 40 (docstrings left out)."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 300, f"{path} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                assert lines <= 40, f"{path}:{node.lineno} {node.name}() has {lines} lines"
