"""What clients ask for, and what engines are sent of it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.handover import Handover, can_share, plan_handover, was_sent
from kvferry.router.prefixes import PIECE_BYTES
from kvferry.router.requests import Ask, BadRequestError, decode_body, prefill_body, read_ask
from router.router_pieces import address

HANDOVER = plan_handover(address("P", 1, kv=2), address("D", 2), "id")


def ask(is_chat: bool = False, **fields: Any) -> Ask:
    return read_ask(json.dumps({"model": "m", "prompt": "p", **fields}).encode(), is_chat=is_chat)


def test_a_handover_names_both_sides_and_one_new_transfer() -> None:
    to_prefill, to_decode = HANDOVER.to_prefill, HANDOVER.to_decode
    assert to_prefill is not None
    assert to_decode is not None
    transfer_id = to_prefill["transfer_id"]
    assert to_prefill == {
        "transfer_id": transfer_id,
        "do_remote_decode": True,
        "remote_addresses": ["10.0.0.2:5000"],
    }
    assert to_decode == {
        "transfer_id": transfer_id,
        "do_remote_prefill": True,
        "remote_addresses": ["10.0.0.1:5000", "10.0.0.1:5001"],
    }
    assert len(transfer_id) == 32
    assert HANDOVER.request_id == "id"
    assert plan_handover(address("P", 1), address("D", 2), "id").to_prefill != to_prefill


@pytest.mark.parametrize(("prefill", "decode"), [(True, True), (True, False), (False, True)])
def test_with_a_legacy_engine_the_request_id_says_all(prefill: bool, decode: bool) -> None:
    found = plan_handover(address("P", 1, legacy=prefill), address("D", 2, legacy=decode), "id")
    head, _, uuid = found.request_id.rpartition("_")
    assert head == "___prefill_addr_10.0.0.1:5000___decode_addr_10.0.0.2:5000"
    assert len(uuid) == 32
    assert int(uuid, 16)
    assert (found.to_prefill, found.to_decode) == (None, None)


def test_a_prefill_engine_says_in_its_answer_that_it_sends() -> None:
    params = {**(HANDOVER.to_decode or {}), "more": 1}
    assert was_sent(HANDOVER, json.dumps({"id": "x", "kv_transfer_params": params}).encode())
    for other in (None, {}, {"transfer_id": "another"}, 5):
        assert not was_sent(HANDOVER, json.dumps({"kv_transfer_params": other}).encode())
    for body in (b"{}", b"[]", b"", b'{"kv_transfer_params": {'):
        assert not was_sent(HANDOVER, body)
        assert was_sent(Handover("id", None, None), body)  # which the old form never says


def test_engines_without_addresses_for_kv_share_none() -> None:
    assert can_share(address("P", 1), address("D", 2))
    assert not can_share(address("P", 1), address("D", 2, kv=0))


def test_an_engine_of_both_kinds_shares_nothing_with_itself() -> None:
    assert not can_share(address("P", 1), address("D", 1))


def test_the_prefill_engine_is_asked_for_one_token_at_once_and_nothing_else() -> None:
    one = ask(
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=99,
        min_tokens=50,
        logprobs=3,
        temperature=0.5,
        user="me",
    )
    assert json.loads(prefill_body(one, HANDOVER)) == {
        "model": "m",
        "prompt": "p",
        "temperature": 0.5,
        "user": "me",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": HANDOVER.to_prefill,
    }


def test_the_prefill_engine_is_asked_for_one_token_of_a_chat() -> None:
    one = ask(is_chat=True, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=99)
    body = json.loads(prefill_body(one, HANDOVER))
    assert (body["max_tokens"], body["max_completion_tokens"]) == (1, 1)


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name not in ("n", "best_of", "use_beam_search", "prompt_embeds")),
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        max_size=6,
    )
)
def test_the_decode_engine_gets_what_the_client_sent(fields: dict[str, Any]) -> None:
    wanted = {"prompt": "p", **fields}
    one = read_ask(json.dumps(wanted, ensure_ascii=False).encode(), is_chat=False)
    assert json.loads(decode_body(one, HANDOVER)) == {**wanted, "kv_transfer_params": HANDOVER.to_decode}
    assert json.loads(decode_body(one, None)) == wanted


def test_what_a_client_says_of_transfers_is_dropped() -> None:
    evil: dict[str, Any] = {"kv_transfer_params": {"remote_addresses": ["evil:1"]}, "ec_transfer_params": {"x": "evil"}}
    one = ask(**evil, request_id="___prefill_addr_evil:1___", vllm_xargs={**evil, "kept": 1})
    assert json.loads(decode_body(one, None))["vllm_xargs"] == {"kept": 1}
    for body in (decode_body(one, None), decode_body(one, HANDOVER), prefill_body(one, HANDOVER)):
        assert b"evil" not in body
    assert json.loads(decode_body(ask(vllm_xargs=["x"]), None))["vllm_xargs"] == ["x"]  # for the engine to refuse
    legacy = Handover("id", None, None)
    assert b"kv_transfer_params" not in decode_body(one, legacy) + prefill_body(one, legacy)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 0}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, None),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt_embeds": ["a", "b"], "prompt": None}, "prompt_embeds"),
        ({"prompt_embeds": ["a"]}, "prompt_embeds"),
    ],
)
def test_what_would_have_several_answers_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(**fields)
    assert caught.value.param == param
    assert (param or "use_beam_search").split("_")[0] in str(caught.value)


def test_several_conversations_are_refused() -> None:
    with pytest.raises(BadRequestError, match="several conversations"):
        ask(is_chat=True, messages=[[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]])


@pytest.mark.parametrize(
    "fields", [{"n": 1}, {"n": None}, {"prompt": ["one"]}, {"prompt": [[1, 2]]}, {"prompt": [1, 2]}, {"prompt": []}]
)
def test_one_prompt_in_any_form_is_one(fields: dict[str, Any]) -> None:
    ask(**fields)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b'{"a": "\\ud800"}']
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="the body is no JSON"):
        read_ask(body, is_chat=False)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_refused(body: bytes) -> None:
    for is_chat in (True, False):
        with contextlib.suppress(BadRequestError):
            read_ask(body, is_chat=is_chat)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, False),
        ({"echo": True}, False),
        ({"logprobs": 1}, False),
        ({"echo": True, "logprobs": 0}, True),
        ({"prompt_logprobs": 0}, True),
    ],
)
def test_whose_prompt_the_decode_engine_computes(fields: dict[str, Any], wanted: bool) -> None:
    assert ask(**fields).wants_prompt is wanted
    assert ask(**fields, prompt="", prompt_embeds="abc").wants_prompt


def test_prompts_that_begin_alike_have_pieces_in_common_in_any_form() -> None:
    for one, other in [
        (ask(prompt="a" * 600), ask(prompt="a" * 600 + "b" * 300)),
        (ask(prompt=[5] * 200), ask(prompt=[[5] * 200 + [6] * 100])),
    ]:
        assert len(one.prefix.pieces) >= 2
        assert other.prefix.pieces[: len(one.prefix.pieces)] == one.prefix.pieces
    first = {"role": "system", "content": "s" * 2 * PIECE_BYTES}
    chats = [ask(is_chat=True, messages=[first, {"role": "user", "content": text * 400}]) for text in "ab"]
    assert chats[0].prefix.pieces[:2] == chats[1].prefix.pieces[:2]
    assert chats[0].prefix.pieces[2:] != chats[1].prefix.pieces[2:]


def test_what_decides_kv_beside_the_prompt_tells_prompts_apart() -> None:
    plain = ask(prompt="a" * 600)
    others = [ask(prompt="a" * 600, cache_salt="s"), ask(prompt="a" * 600, model="lora")]
    assert all(not set(plain.prefix.pieces) & set(other.prefix.pieces) for other in others)
    assert ask(prompt="a" * 600, temperature=1).prefix == plain.prefix


@pytest.mark.parametrize("prompt", [[1, "x"], [1 << 40], [1.5], {"a": 1}, 5, None, [None], [[{"a": 1}]]])
def test_a_prompt_that_is_none_is_for_the_engine_to_refuse(prompt: object) -> None:
    assert json.loads(decode_body(ask(prompt=prompt), None))["prompt"] == prompt


def test_what_is_nested_too_deeply_is_refused_and_what_is_not_can_be_passed_on() -> None:
    refused = 0
    for depth in range(700, 1010):
        body = b'{"messages": %s1%s}' % (b'{"a": ' * depth, b"}" * depth)
        try:
            assert decode_body(read_ask(body, is_chat=True), None)
        except BadRequestError:
            refused += 1
    assert 0 < refused < 310
