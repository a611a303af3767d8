"""What requests say of their KV: two forms, checked, and never a guess."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connectors.vllm.p2p.handover import Handover, HandoverError, Part, answer, handover_of

PREFILL = Part(sends=True, receives=False, get=False, tp_size=1)
DECODE = Part(sends=False, receives=True, get=False, tp_size=1)
BOTH = Part(sends=True, receives=True, get=False, tp_size=1)
HEX = uuid.UUID(int=7).hex
LEGACY = f"___prefill_addr_10.0.0.1:7000___decode_addr_10.0.0.2:8000_{HEX}"


def send(**more: Any) -> dict[str, Any]:
    return {"transfer_id": "abc", "do_remote_decode": True, **more}


def receive(**more: Any) -> dict[str, Any]:
    return {"transfer_id": "abc", "do_remote_prefill": True, **more}


def test_a_request_of_its_own() -> None:
    assert handover_of(None, "r1", BOTH) is None
    assert handover_of({"other": "connector", "do_remote_prefill": False}, "cmpl-x-0-0123abcd", BOTH) is None


@pytest.mark.parametrize("params", ["do_remote_decode", "", 1, 0, 1.5, ["do_remote_prefill"]])
def test_what_is_no_map_at_all(params: object) -> None:
    """vLLM 0.26 hands on what a client puts into `vllm_xargs`; an error of another kind would end the engine."""
    with pytest.raises(HandoverError, match="they are a map"):
        handover_of(params, LEGACY, BOTH)


def test_the_new_form() -> None:
    found = handover_of(send(remote_addresses=["h:1"]), "r", PREFILL)
    assert found == Handover("abc", True, ("h:1",))
    assert handover_of(receive(), "r", DECODE) == Handover("abc", False)
    assert handover_of(receive(remote_addresses=["[::1]:5"], other=3), "r", DECODE) == Handover(
        "abc", False, ("[::1]:5",)
    )


def test_who_asks() -> None:
    get = Part(sends=False, receives=True, get=True, tp_size=1)
    found = handover_of(receive(remote_addresses=["h:1"]), "r", get)
    assert found is not None
    assert found.ask
    found = handover_of(receive(remote_addresses=["h:1"], ask=True), "r", DECODE)
    assert found is not None
    assert found.ask
    with pytest.raises(HandoverError, match="remote_addresses"):
        handover_of(receive(), "r", get)


def test_the_answer_of_a_prefill_engine_is_the_decode_engines_question() -> None:
    for handover, asked in ((Handover("abc", True, ("h:1",)), False), (Handover("abc", True), True)):
        params = answer(handover, ["p:1", "p:2"])
        two = Part(sends=False, receives=True, get=False, tp_size=2)
        assert handover_of(params, "r", two) == Handover("abc", False, ("p:1", "p:2"), ask=asked)
        assert ("ask" in params) is asked


def test_a_prefill_request_without_an_id_gets_one_of_its_own() -> None:
    first, second = (handover_of({"do_remote_decode": True}, "r", PREFILL) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.transfer_id != second.transfer_id


@pytest.mark.parametrize("wrapped", [LEGACY, f"cmpl-{LEGACY}-0-b331e618", f"chatcmpl-{LEGACY}", f"{LEGACY}_0"])
def test_the_old_form(wrapped: str) -> None:
    """The key is the part with addresses and UUID, since vLLM puts other things around it on either side."""
    assert handover_of(None, wrapped, PREFILL) == Handover(LEGACY, True, ("10.0.0.2:8000",))
    assert handover_of(None, wrapped, DECODE) == Handover(LEGACY, False, ("10.0.0.1:7000",))


def test_the_old_form_with_several_ranks_and_with_both_roles() -> None:
    two = Part(sends=True, receives=False, get=False, tp_size=2)
    found = handover_of(None, LEGACY, two)
    assert found is not None
    assert found.addresses == ("10.0.0.2:8000", "10.0.0.2:8001")
    for own, sends in (("10.0.0.1:7000", True), ("10.0.0.2:8000", False)):
        found = handover_of(None, LEGACY, BOTH, own)
        assert found is not None
        assert found.sends is sends
    with pytest.raises(HandoverError, match="this engine is 10"):
        handover_of(None, LEGACY, BOTH, "10.0.0.3:7000")
    get = Part(sends=False, receives=True, get=True, tp_size=1)
    assert handover_of(None, LEGACY, get) == Handover(LEGACY, False, ("10.0.0.1:7000",), ask=True)


def test_the_new_form_wins() -> None:
    assert handover_of(send(), f"cmpl-{LEGACY}-0", PREFILL) == Handover("abc", True)


@pytest.mark.parametrize(
    ("params", "part", "text"),
    [
        (send(), DECODE, "kv_consumer"),
        (receive(), PREFILL, "kv_producer"),
        (receive(transfer_id=None), DECODE, "no transfer_id"),
        (receive(transfer_id=""), DECODE, "transfer_id"),
        (send(transfer_id="x" * 201), PREFILL, "transfer_id"),
        (send(transfer_id=3), PREFILL, "transfer_id"),
        (send(remote_addresses="h:1"), PREFILL, "remote_addresses"),
        (send(remote_addresses=["nowhere"]), PREFILL, "HOST:PORT"),
        (send(remote_addresses=["h:99999"]), PREFILL, "HOST:PORT"),
        (send(remote_addresses=["h:1"] * 3), Part(sends=True, receives=False, get=False, tp_size=2), "3 ranks"),
    ],
)
def test_what_makes_no_sense_is_refused(params: dict[str, Any], part: Part, text: str) -> None:
    with pytest.raises(HandoverError, match=text):
        handover_of(params, "r", part)


@given(
    st.dictionaries(
        st.sampled_from(["transfer_id", "do_remote_decode", "do_remote_prefill", "remote_addresses", "ask"]),
        st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text()),
    ),
    st.text() | st.just(LEGACY),
)
def test_whatever_comes_is_a_handover_or_refused(params: dict[str, Any], request_id: str) -> None:
    try:
        found = handover_of(params, request_id, BOTH, "10.0.0.1:7000")
    except HandoverError:
        return
    assert found is None or 0 < len(found.transfer_id) <= 200
