"""What travels between the two sides."""

from __future__ import annotations

import pickle  # vLLM's own way of sending; only the test does it here

from kvferry.connectors.vllm.plans import JobEnd, LoadPlan, StepPlan, StorePlan, WorkReport
from kvferry.layout import KeyContext


def test_plans_and_reports_travel() -> None:
    plan = StepPlan(
        (LoadPlan(1, "r", 2, (3, 4), 0, 16),), (StorePlan(2, b"\0" * 256, KeyContext("l", "s", ("m",)), (1,), 0),), True
    )
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301
    report = WorkReport({1: JobEnd(1, True)}, {"r"})
    assert pickle.loads(pickle.dumps(report)) == report  # noqa: S301


def test_reports_of_ranks_are_added_up() -> None:
    first, second = WorkReport(), WorkReport()
    assert not first
    first.add(1, failed=False)
    second.add(1, failed=True)
    second.add(2, failed=False)
    second.dropped.add("r")
    whole = first.aggregate(second)
    assert whole.ended == {1: JobEnd(2, True), 2: JobEnd(1, False)}
    assert whole.dropped == {"r"}
    assert whole
