"""What two engines compare of the prompts that one transfer is of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from connectors.vllm_doubles import Request
from kvferry.connectors.vllm.p2p.tags import tag_of

TOKENS = list(range(100, 400))


def picture(identifier: str, offset: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=16))


def test_all_that_makes_kv_differ_is_in_it() -> None:
    asked = [
        Request("r", TOKENS),
        Request("r", [*TOKENS[:-1], 7]),
        Request("r", TOKENS[:-1]),
        Request("r", TOKENS, cache_salt="mine"),
        Request("r", TOKENS, lora_request=SimpleNamespace(lora_name="mine")),
        Request("r", TOKENS, mm_features=[picture("cat", 3)]),
        Request("r", TOKENS, mm_features=[picture("dog", 3)]),
        Request("r", TOKENS, mm_features=[picture("cat", 4)]),
    ]
    tags = [tag_of(request) for request in asked]
    assert len(set(tags)) == len(asked)
    assert {len(tag) for tag in tags} == {32}


def test_what_engines_call_a_request_is_not() -> None:
    one = Request("cmpl-1-abc", list(TOKENS), kv_transfer_params={"transfer_id": "t", "do_remote_decode": True})
    other = Request("cmpl-1-xyz", list(TOKENS), kv_transfer_params={"transfer_id": "t", "do_remote_prefill": True})
    assert tag_of(one) == tag_of(other)
