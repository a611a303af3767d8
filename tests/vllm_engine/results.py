"""The figures and outcomes of a run, as one JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Results:
    """Figures are those of `kvferry bench`; beside them how each test ended."""

    def __init__(self, machine: dict[str, Any]) -> None:
        self._machine = machine
        self._figures: list[dict[str, Any]] = []
        self.tests: dict[str, str] = {}

    def add(self, name: str, value: float, unit: str, *, limit: float | None = None) -> None:
        ratio = None if limit is None else round(value / limit, 4)
        rounded = None if limit is None else round(limit, 3)
        self._figures.append({"name": name, "value": round(value, 3), "unit": unit, "limit": rounded, "ratio": ratio})

    def write(self, path: Path, bench: str = "vllm") -> None:
        passed = sum(outcome == "passed" for outcome in self.tests.values())
        found = {
            "bench": bench,
            "machine": self._machine,
            "results": self._figures,
            "passed": passed,
            "failed": len(self.tests) - passed,
            "tests": self.tests,
        }
        path.write_text(json.dumps(found, indent=1) + "\n")
