"""Settings of P2pNcclConnector: those of the removed connector, wherever a release of vLLM has them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.vllm.p2p.settings import P2pSettings

OLD = {"proxy_ip": "10.0.1.1", "proxy_port": "30001", "http_port": "20001", "send_type": "PUT", "mem_pool_size_gb": "2"}


def of(extra: dict[str, Any] | None = None, **top: Any) -> P2pSettings:
    return P2pSettings.of(SimpleNamespace(kv_connector_extra_config=extra or {}, **top))


def test_defaults() -> None:
    settings = of()
    assert settings == P2pSettings()
    assert (settings.kv_port, settings.send_type, settings.proxy) == (14_579, "PUT_ASYNC", None)


def test_the_removed_connectors_configuration_with_numbers_as_strings() -> None:
    """As a release has it that knows kv_ip and kv_buffer_size beside the extra configuration."""
    settings = of(OLD, kv_ip="127.0.0.1", kv_port=21_001, kv_buffer_size=1e1)
    assert settings.proxy == "10.0.1.1:30001"
    assert (settings.http_port, settings.send_type, settings.mem_pool_size_gb) == (20_001, "PUT", 2.0)
    assert (settings.kv_port, settings.kv_buffer_size, settings.kv_ip) == (21_001, 10.0, "")


def test_the_same_where_vllm_has_dropped_those_keys() -> None:
    moved = {"kv_port": "21001", "kv_buffer_size": "1e1", "kv_rank": 0, "kv_parallel_size": 2, "kv_ip": "10.0.0.7"}
    settings = of(OLD | moved, kv_port=14_579)
    assert (settings.kv_port, settings.kv_buffer_size, settings.kv_ip) == (21_001, 10.0, "10.0.0.7")


def test_where_an_engine_is_reached() -> None:
    def nobody_asks() -> str:
        raise AssertionError

    assert of().host(nobody_asks) == "127.0.0.1"
    assert of({"kv_ip": "10.0.0.7"}).host(nobody_asks) == "10.0.0.7"
    assert of(OLD | {"proxy_ip": "127.0.0.1"}).host(nobody_asks) == "127.0.0.1"
    assert of(OLD).host(lambda: "10.0.0.9") == "10.0.0.9"


def test_each_rank_of_each_data_parallel_engine_has_a_port_of_its_own() -> None:
    settings = of({"kv_port": 7000})
    ports = {
        settings.p2p_config("127.0.0.1", rank=rank, size=2, data_rank=data, keeps=True).address
        for rank in (0, 1)
        for data in (0, 1)
    }
    assert ports == {f"127.0.0.1:{port}" for port in (7000, 7001, 7002, 7003)}
    free = of({"kv_port": 0}).p2p_config("127.0.0.1", rank=1, size=2, data_rank=3, keeps=True)
    assert free.address == "127.0.0.1:0"
    with pytest.raises(ValueError, match="leaves no port"):
        of({"kv_port": 65_535}).p2p_config("127.0.0.1", rank=1, size=2, data_rank=0, keeps=True)


def test_who_keeps_nothing_needs_no_room() -> None:
    settings = of({"kv_buffer_size": 1 << 20, "mem_pool_size_gb": 1})
    config = settings.p2p_config("127.0.0.1", rank=0, size=1, data_rank=0, keeps=False)
    assert (config.kv_buffer_size, config.mem_pool_size_gb) == (0, 0)
    config = settings.p2p_config("127.0.0.1", rank=0, size=1, data_rank=0, keeps=True)
    assert (config.kv_buffer_size, config.mem_pool_size_gb) == (1 << 20, 1)


def test_beyond_loopback_somebody_has_to_be_kept_out(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("engines:0123456789abcdef\n")
    where: dict[str, Any] = {"host": "10.0.0.7", "rank": 0, "size": 1, "data_rank": 0, "keeps": True}
    with pytest.raises(ValueError, match="token_file"):
        of().p2p_config(**where)
    assert of({"insecure": True}).p2p_config(**where).insecure
    assert of({"token_file": str(secret)}).p2p_config(**where).token == "engines:0123456789abcdef"
    assert of({"token_file": str(secret)}).secret == b"engines:0123456789abcdef"
    assert of({}).secret is None
    secret.write_text("k" * 40)
    assert of({"curve_key_file": str(secret)}).p2p_config(**where).curve_secret_key == "k" * 40
    assert of({"curve_key_file": str(secret)}).secret == b"k" * 40
    with pytest.raises(ValueError, match="token_file of P2pNcclConnector"):
        of({"token_file": str(tmp_path / "none")}).p2p_config(**where)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"send_tpye": "PUT"}, "did you mean 'send_type'"),
        ({"send_type": "POST"}, "send_type"),
        ({"kv_port": 70_000}, "kv_port"),
        ({"kv_buffer_size": "much"}, "kv_buffer_size"),
        ({"lease_s": 0}, "lease_s"),
        ({"kv_ip": "0.0.0.0"}, "the address at which other engines reach"),
        ({"proxy_ip": "10.0.1.1", "proxy_port": 1}, "http_port"),
        ({"proxy_port": 1}, "proxy_ip and http_port"),
        ({"proxy_ip": "no host", "proxy_port": 1, "http_port": 2}, "HOST:PORT"),
        ({"carrier": "pigeon"}, "carrier"),
    ],
)
def test_mistakes_are_named(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        of(extra)
    assert text in str(caught.value)


def test_an_http_port_alone_and_empty_values_are_as_they_used_to_be() -> None:
    assert of({"http_port": "20001", "proxy_ip": "", "proxy_port": ""}).proxy is None
