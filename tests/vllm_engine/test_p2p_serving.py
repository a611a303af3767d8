"""A prefill engine as people run it, behind vLLM's OpenAI server, with several data-parallel engines."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
import pytest
import zmq

from vllm_engine.models import prompt
from vllm_engine.peers import connector, submit
from vllm_engine.stage import IS_026, Reference, Stage
from vllm_engine.test_serving import ApiServer


@pytest.mark.full
def test_data_parallel_prefill_engines(stage: Stage, reference: Reference, model: Any) -> None:
    """Each is heard of by its own rank and addresses, and hands over what it was asked for."""
    if IS_026:
        pytest.skip("data parallelism on a CPU is tested with the newest release")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        config = connector("kv_producer", proxy_ip="127.0.0.1", proxy_port=port, http_port=1)
        server = ApiServer(model, config, stage.folder / "api.log", "--data-parallel-size", "2", "--max-num-seqs", "8")
        try:
            addresses: dict[int, list[str]] = {}
            while len(addresses) < 2:
                assert router.poll(30_000)
                heard = msgspec.msgpack.decode(router.recv_multipart()[1])
                addresses[heard["dp_rank"]] = heard["zmq_addresses"]
            assert addresses[0] != addresses[1]
            decode = stage.engine(connector=connector("kv_consumer"))
            for rank in (0, 1):
                hands_over(server, rank, addresses[rank], decode, reference)
            assert decode.call("counts")["counts"]["p2p_receives"] == 2
        finally:
            server.kill()


def hands_over(server: ApiServer, rank: int, addresses: list[str], decode: Any, reference: Reference) -> None:
    asked = prompt(730 + rank, 300)
    common = {"transfer_id": uuid.uuid4().hex, "remote_addresses": decode.call("addresses")["addresses"]}
    answer = server.complete(
        asked,
        headers={"X-data-parallel-rank": str(rank)},
        max_tokens=1,
        kv_transfer_params={**common, "do_remote_decode": True},
    )
    params = answer["kv_transfer_params"]
    assert params["remote_addresses"] == addresses
    assert params["transfer_id"] == common["transfer_id"]
    names = submit(decode, asked, 16, params)
    assert decode.call("run")["done"]
    assert decode.call("results", ids=names)["tokens"] == reference([asked])
