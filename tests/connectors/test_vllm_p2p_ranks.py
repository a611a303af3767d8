"""Each pair of ranks that share heads meets once, from either side."""

from __future__ import annotations

import pytest

from kvferry.connectors.vllm.p2p.ranks import Rank


def names(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 8), (8, 2), (4, 4), (3, 6)])
@pytest.mark.parametrize("replicated", [True, False])
def test_both_sides_agree_on_who_meets_whom(senders: int, receivers: int, replicated: bool) -> None:
    sent = {
        (f"s{rank}", target)
        for rank in range(senders)
        for target in Rank(rank, senders, replicated).targets(names("r", receivers))
    }
    wanted = {
        (source, f"r{rank}")
        for rank in range(receivers)
        for source in Rank(rank, receivers, replicated).sources(names("s", senders))
    }
    assert sent == wanted
    assert {target for _, target in sent} == set(names("r", receivers))
    if replicated:
        assert len(sent) == receivers  # nobody gets the same twice
    else:
        assert len(sent) == max(senders, receivers)
