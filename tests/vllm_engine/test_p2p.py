"""Prefill in one engine, decode in another: the tokens are those of one engine, and the KV really comes over."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from vllm_engine.models import prompt
from vllm_engine.peers import Peers, addresses, all_blocks_are_free, submit
from vllm_engine.stage import Reference, Stage

BLOCK = 32
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100, 700, 1500)


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    """Where engines say that they are there."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.bind_to_random_port("tcp://127.0.0.1")
        yield sock


def test_from_prefill_to_decode(stage: Stage, reference: Reference, router: zmq.Socket[bytes]) -> None:
    """All lengths; then the control: with another prompt's KV the tokens are others; then a proxy that knows less."""
    port = router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    peers = Peers(stage, proxy_ip="127.0.0.1", proxy_port=port, http_port="8100")
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    found = peers.generate(prompts)
    assert found["tokens"] == reference(prompts)
    assert peers.counts()["p2p_receives"] == len(LENGTHS) - 1
    engines_are_heard_of(router, peers)

    other, asked = prompt(500, 300), prompt(501, 300)
    assert swapped(peers, other, asked) == reference([asked])  # refused, and computed
    for engine in (peers.prefill, peers.decode):
        engine.call("take_any_kv")
    assert swapped(peers, other, asked) != reference([asked])

    one_after_the_other(peers, reference)
    all_blocks_are_free(peers.prefill, peers.decode)


def swapped(peers: Peers, other: list[int], asked: list[int]) -> Any:
    """Tokens for a prompt whose transfer brings KV of the other."""
    to_prefill, to_decode = peers.params()
    submit(peers.prefill, other, 1, to_prefill)
    names = submit(peers.decode, asked, 16, to_decode)
    peers.run()
    return peers.decode.call("results", ids=names)["tokens"]


def engines_are_heard_of(router: zmq.Socket[bytes], peers: Peers) -> None:
    heard: dict[str, Any] = {}
    while len(heard) < 2:
        assert router.poll(20_000)
        message = msgspec.msgpack.decode(router.recv_multipart()[1])
        heard[message["type"]] = message
    for kind, engine in (("P", peers.prefill), ("D", peers.decode)):
        own = addresses(engine)
        wanted = {"type": kind, "http_address": "127.0.0.1:8100", "zmq_address": own[0], "zmq_addresses": own}
        assert heard[kind] == wanted | {"kvferry": 1}


def one_after_the_other(peers: Peers, reference: Reference) -> None:
    """A proxy that lets the prefill engine end first, and hands on what it answers."""
    asked = prompt(510, 400)
    before = peers.counts()["p2p_receives"]
    names = submit(peers.prefill, asked, 1, {"do_remote_decode": True})
    peers.prefill.call("run")
    (params,) = peers.prefill.call("results", ids=names)["params"]
    wanted = {"do_remote_prefill": True, "remote_addresses": addresses(peers.prefill), "ask": True}
    assert {key: params[key] for key in wanted} == wanted  # vLLM adds a key of its own
    names = submit(peers.decode, asked, 16, params)
    peers.decode.call("run")
    assert peers.decode.call("results", ids=names)["tokens"] == reference([asked])
    assert peers.counts()["p2p_receives"] == before + 1


@pytest.mark.full
@pytest.mark.parametrize("send_type", ["PUT", "PUT_ASYNC", "GET"])
@pytest.mark.parametrize(("buffer_bytes", "pool_gb"), [(64 << 20, 0), (1 << 20, 0.25), (1 << 20, 0), (0, 0)])
@pytest.mark.parametrize("carrier", ["ipc", "host"])
def test_whoever_is_first(
    stage: Stage, reference: Reference, send_type: str, buffer_bytes: int, pool_gb: float, carrier: str
) -> None:
    """KV that comes before its request waits in the buffer, in the pool behind it, or at its sender."""
    peers = Peers(stage, send_type=send_type, kv_buffer_size=buffer_bytes, mem_pool_size_gb=pool_gb, carrier=carrier)
    prompts = [prompt(seed, length) for seed, length in ((520, 1500), (521, 40), (522, 900), (523, 700))]
    first, names = peers.submit(prompts)
    if send_type == "PUT" and buffer_bytes < 8 << 20:
        peers.run()  # whose steps wait for the decode engine
    else:
        peers.prefill.call("run")
        peers.decode.call("run")
    assert peers.decode.call("results", ids=names)["tokens"] == reference(prompts)
    tokens = peers.prefill.call("results", ids=first)["tokens"]
    assert tokens == [wanted[:1] for wanted in reference(prompts)]
    all_blocks_are_free(peers.prefill, peers.decode)
    counts = peers.counts()
    assert counts["p2p_receives"] == counts["p2p_sends"] == len(prompts)


@pytest.mark.full
def test_prefix_hits_on_either_side(stage: Stage, reference: Reference) -> None:
    """Either engine knows the beginning of a prompt, both do, and the decode engine knows all of it."""
    caching = {"enable_prefix_caching": True}
    peers = Peers(stage, prefill=caching, decode=caching)
    base = prompt(530, 330)
    prompts = {name: base[:160] + prompt(seed, 200) for seed, name in enumerate(("prefill", "decode", "both"), 531)}
    peers.prefill.generate([prompts["prefill"][:160], prompts["both"][:100]], 1)
    asked = list(prompts.values())
    assert peers.generate(asked[:1])["tokens"] == reference(asked[:1])
    peers.decode.generate([prompts["decode"][:200]], 1)
    assert peers.generate(asked[1:])["tokens"] == reference(asked[1:])
    again = peers.generate(asked)
    assert again["tokens"] == reference(asked)
    whole = prompt(540, 4 * BLOCK + 1)  # of which the decode engine has all but the last token
    peers.decode.generate([whole])
    assert peers.generate([whole])["tokens"] == reference([whole])
    counts = peers.counts()
    assert counts["p2p_not_taken"] == 1
    assert counts["p2p_received_tokens"] < 6 * 359 + 128
    all_blocks_are_free(peers.prefill, peers.decode)


@pytest.mark.full
def test_chunked_prefill_and_a_decode_engine_that_computes_meanwhile(stage: Stage, reference: Reference) -> None:
    small = {"max_num_batched_tokens": 96, "max_num_seqs": 4}
    peers = Peers(stage, prefill=small, decode=small)
    busy = prompt(549, 200)
    alone = peers.decode.call("submit", prompts=[busy], max_tokens=60)["ids"]
    prompts = [prompt(seed, length) for seed, length in ((550, 500), (551, 97), (552, 96), (553, 310))]
    assert peers.generate(prompts)["tokens"] == reference(prompts)
    assert peers.decode.call("results", ids=alone)["tokens"] == reference([busy], 60)
    assert peers.counts()["p2p_receives"] == len(prompts)
    all_blocks_are_free(peers.prefill, peers.decode)


@pytest.mark.full
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_the_old_form_of_request_ids(stage: Stage, reference: Reference, send_type: str) -> None:
    """vLLM adds another random end to it in each engine; what is between counts."""
    peers = Peers(stage, send_type=send_type)
    asked = prompt(560, 300)
    for wrap in ("{}", "cmpl-{}-0", "chatcmpl-{}"):
        (prefill,), (decode,) = addresses(peers.prefill), addresses(peers.decode)
        name = wrap.format(f"___prefill_addr_{prefill}___decode_addr_{decode}_{uuid.uuid4().hex}")
        submit(peers.prefill, asked, 1, None, names=[name])
        names = submit(peers.decode, asked, 16, None, names=[name])
        peers.run()
        assert peers.decode.call("results", ids=names)["tokens"] == reference([asked])
    assert peers.counts()["p2p_receives"] == 3


@pytest.mark.full
def test_one_id_for_several_requests(stage: Stage, reference: Reference) -> None:
    """Only the first gets KV; the others are computed, and nothing is mixed up."""
    peers = Peers(stage)
    asked = [prompt(seed, 300) for seed in (570, 571)]
    to_prefill, to_decode = peers.params()
    names = []
    for one in asked:
        submit(peers.prefill, one, 1, to_prefill)
        names += submit(peers.decode, one, 16, to_decode)
    peers.run()
    assert peers.decode.call("results", ids=names)["tokens"] == reference(asked)
    counts = peers.counts()
    assert counts["p2p_receives"] == 1
    assert counts["p2p_refused"] == 1
    all_blocks_are_free(peers.prefill, peers.decode)
