"""The router between real servers: what goes where, and what comes back."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from router.fleet import PATH, Fleet, Router, eventually, texts

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response) -> dict[str, object]:
    error: dict[str, object] = response.json()["error"]
    return error


def test_both_engines_are_asked_and_the_decode_engine_answers(fleet: Fleet) -> None:
    prefill, decode, router = fleet.pair()
    reply = router.post(max_tokens=9, min_tokens=3)
    assert (reply.status_code, reply.json()) == (200, {"engine": "d", "text": "hi-" * 4})
    (read,), (answered,) = prefill.seen(), decode.seen()
    transfer_id = read["body"].pop("kv_transfer_params")["transfer_id"]
    assert read["body"] == {"model": "m", "prompt": "hi", "max_tokens": 1, "stream": False}
    assert answered["body"] == {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 9,
        "min_tokens": 3,
        "kv_transfer_params": {
            "transfer_id": transfer_id,
            "do_remote_prefill": True,
            "remote_addresses": [prefill.kv],
        },
    }
    assert read["headers"]["x-request-id"] == answered["headers"]["x-request-id"]


@pytest.mark.parametrize(("path", "fields"), [(PATH, {}), (CHAT, {"messages": MESSAGES})])
def test_a_stream_comes_through_as_the_decode_engine_sends_it(
    fleet: Fleet, path: str, fields: dict[str, object]
) -> None:
    prefill, decode, router = fleet.pair()
    decode.tell(events=50)
    body = {"model": "m", "prompt": "hi", "stream": True, **fields}
    direct = httpx.post(f"http://{decode.http}{path}", json=body).content
    with router.stream(path, **fields) as reply:
        found = reply.read()
    assert found == direct
    assert found.endswith(b"data: [DONE]\n\n")
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert [one["path"] for one in prefill.seen()] == [path]
    assert prefill.seen()[0]["body"]["stream"] is False


def test_events_come_as_they_are_made(fleet: Fleet) -> None:
    """The first one is here while the engine has not made the others, nor the prefill engine ended its answer."""
    prefill, decode, router = fleet.pair()
    prefill.tell(hold=True)
    decode.tell(hang_at=1)
    with router.stream() as reply:
        assert json.loads(next(reply.iter_raw())[6:])["number"] == 0
    eventually(lambda: prefill.states() == decode.states() == ["aborted"])


def test_both_are_asked_at_once(fleet: Fleet) -> None:
    prefill, decode, router = fleet.pair()
    for one in (prefill, decode):
        one.tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(router.post)
        eventually(lambda: prefill.states() == decode.states() == ["open"])
        for one in (decode, prefill):
            one.tell(hold=False)
        assert reply.result().status_code == 200


def test_headers_go_through_and_the_authorisation_with_them(fleet: Fleet) -> None:
    prefill, decode, router = fleet.pair()
    headers = {"Authorization": "Bearer x", "X-Request-Id": "mine-1", "X-data-parallel-rank": "5", "Cookie": "a=b"}
    router.post(headers=headers)
    for one in (prefill, decode):
        (seen,) = one.seen()
        assert seen["headers"]["authorization"] == "Bearer x"
        assert seen["headers"]["x-request-id"] == "mine-1"
        assert "x-data-parallel-rank" not in seen["headers"]
    assert router.get("/v1/models", headers=headers).json()["authorized"] == "Bearer x"


def test_an_error_of_the_decode_engine_that_is_the_clients_comes_through(fleet: Fleet) -> None:
    _, decode, router = fleet.pair()
    decode.tell(status=404)
    reply = router.post()
    assert (reply.status_code, error_of(reply)["message"]) == (404, "as told")
    with router.stream() as streamed:
        assert streamed.status_code == 404
        streamed.read()
    assert len(decode.seen()) == 2
    router.await_measure('requests_total{outcome="refused"}', 2)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_request"),
        (b'{"n": 2}', 400, "invalid_request"),
        (b'{"prompt": ["a", "b"]}', 400, "invalid_request"),
        (b'"' + b"x" * 3000 + b'"', 413, "body_too_large"),
    ],
)
def test_what_is_wrong_is_told_as_an_error_object_and_no_engine_is_asked(
    fleet: Fleet, body: bytes, status: int, code: str
) -> None:
    prefill, decode, router = fleet.pair("--max-body", "2KiB")
    for content in (body, iter([body])):  # with its length said before, and in chunks
        reply = httpx.post(router.url + PATH, content=content)
        assert (reply.status_code, error_of(reply)["code"]) == (status, code)
    assert prefill.seen() == decode.seen() == []


def test_other_pages_and_methods_are_errors_as_well(fleet: Fleet) -> None:
    router = fleet.router("--heartbeat", ":0")
    assert (router.get("/v1/other").status_code, error_of(router.get("/v1/other"))["code"]) == (404, "no_such_page")
    assert router.get(PATH).status_code == 405
    assert error_of(router.get(PATH))["code"] == "invalid_request"


def test_with_no_engine_it_says_so_at_once(fleet: Fleet) -> None:
    router = fleet.router("--heartbeat", ":0")
    reply = router.post()
    assert (reply.status_code, error_of(reply)["code"], reply.headers["retry-after"]) == (503, "no_engine", "1")
    health = router.get("/health")
    assert (health.status_code, health.json()["reasons"]) == (503, ["no decode engine is up"])
    assert router.get("/v1/models").status_code == 503


def test_one_engine_alone_is_enough(fleet: Fleet) -> None:
    decode = fleet.engine("d")
    router = fleet.router("--decode", f"http://{decode.http}")
    router.await_engines(0, 1)
    assert router.post().json()["engine"] == "d"
    assert "kv_transfer_params" not in decode.seen()[0]["body"]
    health = router.get("/health")
    assert (health.status_code, len(health.json()["warnings"])) == (200, 1)
    assert router.measure('alone_total{reason="no_prefill"}') == 1


def test_what_needs_all_of_the_prompt_is_not_shared(fleet: Fleet) -> None:
    prefill, decode, router = fleet.pair()
    assert router.post(prompt_logprobs=1).status_code == 200
    assert prefill.seen() == []
    assert "kv_transfer_params" not in decode.seen()[0]["body"]


def test_models_are_those_of_an_engine_that_answers(fleet: Fleet) -> None:
    _, decode, router = fleet.pair()
    assert router.get("/v1/models").json()["data"] == [{"id": "d"}]
    decode.kill()
    assert router.get("/v1/models").json()["data"] == [{"id": "p"}]


def test_prompts_that_begin_alike_go_to_one_prefill_engine(fleet: Fleet) -> None:
    prefills, decode = [fleet.engine("p1"), fleet.engine("p2")], fleet.engine("d")
    router = fleet.router("--prefill", prefills[0].flag, "--prefill", prefills[1].flag, "--decode", decode.flag)
    router.await_engines(2, 1)
    beginnings = ["a" * 2000, "b" * 2000]
    for _ in range(4):
        for beginning in beginnings:
            router.post(prompt=beginning + "x" * 300)
    found = [{one["body"]["prompt"][0] for one in prefill.seen()} for prefill in prefills]
    assert sorted(found, key=str) == [{"a"}, {"b"}]
    assert router.measure("prompt_bytes_seen_total") >= 6 * 1792


def test_the_decode_engine_with_the_fewest_requests_answers(fleet: Fleet) -> None:
    prefill, decodes = fleet.engine("p"), [fleet.engine("d1"), fleet.engine("d2")]
    router = fleet.router("--prefill", prefill.flag, "--decode", decodes[0].flag, "--decode", decodes[1].flag)
    router.await_engines(1, 2)
    decodes[0].tell(hold=True)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(router.post)
        eventually(lambda: len(decodes[0].seen()) + len(decodes[1].seen()) == 1)
        if decodes[1].seen():  # it was that one's turn
            first.result()
            first = pool.submit(router.post)
            eventually(lambda: decodes[0].states() == ["open"])
        assert [router.post().json()["engine"] for _ in range(5)] == ["d2"] * 5
        decodes[0].tell(hold=False)
        assert first.result().json()["engine"] == "d1"


def test_64_streams_at_once_each_get_their_own(fleet: Fleet) -> None:
    _, decode, router = fleet.pair()
    decode.tell(hold=True, events=20)

    def ask(number: int) -> list[object]:
        with router.stream(prompt=f"p{number}") as reply:
            return texts(reply)

    with ThreadPoolExecutor(64) as pool:
        replies = [pool.submit(ask, number) for number in range(64)]
        eventually(lambda: decode.states().count("open") == 64, 40)
        decode.tell(hold=False)
        for number, reply in enumerate(replies):
            *events, done = reply.result(40)
            assert done == "[DONE]"
            assert events == [{"engine": "d", "text": f"p{number}-", "number": n} for n in range(20)]
    router.await_measure('requests_total{outcome="answered"}', 64)
    router.await_measure("requests_going_on", 0)


def test_more_requests_than_it_takes_are_refused(fleet: Fleet) -> None:
    _, decode, router = fleet.pair("--max-requests", "2")
    decode.tell(hold=True)
    with ThreadPoolExecutor(2) as pool:
        going_on = [pool.submit(router.post) for _ in range(2)]
        eventually(lambda: decode.states() == ["open"] * 2)
        reply = router.post()
        assert (reply.status_code, error_of(reply)["code"]) == (503, "overloaded")
        decode.tell(hold=False)
        assert [one.result().status_code for one in going_on] == [200, 200]
    assert router.post().status_code == 200


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_is_seen_by_both_engines(fleet: Fleet, streaming: bool) -> None:
    prefill, decode, router = fleet.pair()
    for one in (prefill, decode):
        one.tell(hold=True)
    _leave(router, streaming, lambda: prefill.states() == decode.states() == ["open"])
    eventually(lambda: prefill.states() == decode.states() == ["aborted"])
    router.await_measure('requests_total{outcome="client_left"}', 1)
    router.await_measure("requests_going_on", 0)


def _leave(router: Router, streaming: bool, until: object) -> None:
    """Ask, and hang up once `until` holds."""
    host, port = router.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "hi", "stream": streaming}).encode()
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        eventually(until)  # type: ignore[arg-type]
