"""Which headers go through."""

from __future__ import annotations

import pytest

from kvferry.router.headers import Headers, answer_headers, clean_request_id, engine_headers
from router.router_pieces import address

CLIENT: Headers = [
    (b"host", b"router:1"),
    (b"authorization", b"Bearer secret"),
    (b"connection", b"keep-alive, X-Hop"),
    (b"x-hop", b"1"),
    (b"keep-alive", b"timeout=5"),
    (b"transfer-encoding", b"chunked"),
    (b"te", b"trailers"),
    (b"upgrade", b"websocket"),
    (b"proxy-authorization", b"Basic x"),
    (b"content-length", b"5"),
    (b"content-type", b"text/plain"),
    (b"accept-encoding", b"gzip"),
    (b"traceparent", b"00-1-2-3"),
    (b"x-request-id", b"___prefill_addr_evil:1___decode_addr_evil:2_00"),
    (b"x-data-parallel-rank", b"7"),
]


def test_an_engine_gets_the_authorisation_and_nothing_of_the_connection() -> None:
    assert engine_headers(CLIENT, address("D", 1), "id") == [
        (b"authorization", b"Bearer secret"),
        (b"traceparent", b"00-1-2-3"),
        (b"content-type", b"application/json"),
        (b"accept-encoding", b"identity"),
        (b"x-request-id", b"id"),
    ]


def test_the_data_parallel_rank_is_the_routers_choice() -> None:
    assert engine_headers(CLIENT, address("D", 1, dp_rank=0), "id")[-1] == (b"x-data-parallel-rank", b"0")


def test_the_client_gets_nothing_of_the_engines_connection() -> None:
    found = answer_headers(
        [
            (b"date", b"now"),
            (b"server", b"uvicorn"),
            (b"content-length", b"5"),
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"transfer-encoding", b"chunked"),
            (b"x-custom", b"1"),
        ]
    )
    assert found == [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-custom", b"1")]


@pytest.mark.parametrize("given", [b"abc-1.2_X", b"a" * 128])
def test_a_clients_id_is_kept(given: bytes) -> None:
    assert clean_request_id([(b"x-request-id", given)]) == given.decode()


@pytest.mark.parametrize(
    "given", [b"", b"a" * 129, b"a b", b"a:1", b"x___y", b"\xff", b"___prefill_addr_evil:1___decode_addr_evil:2_00"]
)
def test_an_id_that_says_more_than_a_name_is_not(given: bytes) -> None:
    found = clean_request_id([(b"x-request-id", given)])
    assert len(found) == 32
    assert found != clean_request_id([])
