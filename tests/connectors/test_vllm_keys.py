"""A request's context: all that decides its KV beside tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from connectors.vllm_doubles import Request
from kvferry.connectors.vllm.keys import NotExpressible, context_of
from kvferry.layout import KeyContext


def context(request: Request, epoch: str = "") -> KeyContext:
    return context_of(request, epoch=epoch, lora_identity=lambda number, name, path, base: f"{name}:{path}:{base}")


def picture(identifier: str, offset: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=10))


def test_a_plain_request() -> None:
    assert context(Request("r", [1])) == KeyContext()


def test_what_makes_kv_differ_makes_contexts_differ() -> None:
    lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/a", base_model_name=None)
    other = SimpleNamespace(lora_name="a", lora_int_id=2, lora_path="/b", base_model_name=None)
    requests = [
        Request("r", [1]),
        Request("r", [1], lora_request=lora),
        Request("r", [1], lora_request=other),
        Request("r", [1], cache_salt="x"),
        Request("r", [1], mm_features=[picture("p", 0)]),
        Request("r", [1], mm_features=[picture("p", 5)]),
        Request("r", [1], mm_features=[picture("q", 0)]),
        Request("r", [1], mm_features=[picture("p", 0), picture("q", 20)]),
    ]
    found = [context(request) for request in requests]
    found.append(context(Request("r", [1]), epoch="after a reset"))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "request_",
    [
        Request("r", None, prompt_embeds=object()),
        Request("r", [1], prompt_embeds=object()),
        Request("r", [1], mm_features=[picture("", 0)]),
        Request("r", [1], lora_request=SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/", load_inplace=True)),
    ],
)
def test_what_no_key_can_express(request_: Request) -> None:
    with pytest.raises(NotExpressible):
        context(request_)
