"""What a caller is told who makes a mistake: which value it is, on which side, and what to give instead."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from kvferry.errors import BlockIdError, LayoutError, TransferError
from kvferry.p2p import P2pConfig, P2pNcclEngine
from p2p.conftest import Make
from p2p.p2p_side import FORMAT
from p2p.pairs import FROM, TO, Pair, equal, error_code, send_one_layer


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"kv_buffer_size": "1GiB"}, "kv_buffer_size is '1GiB', of type str; it must be a whole number"),
        ({"kv_buffer_size": 1e9}, "kv_buffer_size is 1000000000.0, of type float; it must be a whole number"),
        ({"kv_buffer_size": -1}, "kv_buffer_size is -1; it must be at least 0 bytes"),
        ({"mem_pool_size_gb": "1"}, "mem_pool_size_gb is '1', of type str; it must be a number"),
        ({"mem_pool_size_gb": -1}, "mem_pool_size_gb is -1; it must be 0 to 1048575 GiB"),
        ({"lease_s": None}, "lease_s is None, of type NoneType; it must be a number"),
        ({"device": "cuda:0"}, "device is 'cuda:0', of type str; it must be a whole number"),
        ({"tp_size": True}, "tp_size is True, of type bool; it must be a whole number"),
        ({"address": 7001}, "address is of type int; it must be a string"),
        ({"token": b"a token of sixteen bytes"}, "token is of type bytes; it must be a string"),
    ],
)
def test_a_setting_of_another_type_is_named(wrong: dict[str, Any], text: str) -> None:
    """A secret is not shown."""
    with pytest.raises(ValueError) as caught:
        P2pConfig(**wrong)
    assert str(caught.value) == text


def test_an_address_in_place_of_a_configuration() -> None:
    address: Any = "127.0.0.1:0"
    with pytest.raises(TypeError, match=r"config is of type str; give P2pConfig\(address="):
        P2pNcclEngine(address)


def test_tensors_without_names(make: Make) -> None:
    caches: Any = [torch.zeros(2, 8, 16, 2, 32)]
    with pytest.raises(LayoutError, match="kv_caches is of type list; give a tensor for each layer's name"):
        make().register_kv_caches(caches, format=FORMAT)


def test_block_ids_are_whole_numbers(pair: Pair) -> None:
    """Others are not rounded to ids of blocks that nobody meant."""
    p, _, d, _ = pair
    ids: Any = [1.5, 2.5]
    with pytest.raises(BlockIdError, match="block ids are float64; give whole numbers"):
        p.send_blocks("abc", ids, d.address)
    with pytest.raises(BlockIdError, match="block ids are float64; give whole numbers"):
        d.receive_blocks("abc", ids)


def test_layers_have_numbers(pair: Pair) -> None:
    """What is no layer's number is refused at once, and the transfer goes on."""
    p, source, d, target = pair
    receiving, sending = send_one_layer(p, d)
    layers = len(source)
    wrong: list[Any] = ["layer.1", layers, -1]
    for layer in wrong:
        with pytest.raises(LayoutError, match=f"layers have the numbers 0 to {layers - 1}"):
            sending.layer_ready(layer)
        with pytest.raises(LayoutError, match=f"layers have the numbers 0 to {layers - 1}"):
            receiving.wait_layer(layer, 20)
    for layer in range(1, layers):
        sending.layer_ready(layer)
    receiving.wait(20)
    assert equal(source, target)


def test_what_the_peer_says_of_itself_is_the_peers(pair: Pair, make: Make) -> None:
    """Its "here" is there, and "this engine" is not the one that raises."""
    p, _, d, _ = pair
    other = make({"layer.0": torch.zeros(2, 8, 16, 2, 32, dtype=torch.float16)})
    with pytest.raises(TransferError) as caught:
        p.send_blocks("abc", FROM, other.address).wait(20)
    where = f"<session to {other.address}, greeting>"
    assert caught.value.text == f"{where}: the peer says: blocks of 16 tokens and 1 layers here, 16 and 4 there"
    receiving, _ = send_one_layer(p, d)
    p.close()
    assert error_code(receiving) in ("closed", "peer_gone")
    error = receiving.error
    assert error is not None
    assert error.code == "peer_gone" or error.text.endswith("the peer says: this engine is closed")
    assert not d.receive_blocks("abd", TO).done()


def test_what_was_not_sent_is_in_the_log_by_its_id(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine, other = make(), make(kv_buffer_size=1024)
    sending = engine.send_tensor("one too large", torch.zeros(5000), other.address)
    assert error_code(sending) == "too_large"
    text = (
        "20000 bytes; the receiver has a buffer of 1024 bytes for them: raise its kv_buffer_size, or await it with out="
    )
    assert f"transfer 'one too large' was not sent: the receiver says: {text}" in caplog.text
    receiving = other.recv_tensor_async("awaited", out=torch.ones(5000))
    engine.send_tensor("awaited", torch.zeros(5000), other.address).wait(20)
    assert not receiving.tensor(20).any()


def test_an_address_where_something_else_listens(make: Make) -> None:
    engine = make(connect_timeout_s=0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sending = engine.send_tensor("t", torch.zeros(5), f"127.0.0.1:{server.getsockname()[1]}")
        assert error_code(sending) == "unreachable"
    assert "did not come up within 0.2 s: no engine answers at that address" in str(sending.error)
