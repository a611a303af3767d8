"""A remote that hangs, breaks off, refuses or lies: a named error within its time, and no secret in its text."""

from __future__ import annotations

import logging
import time
import traceback

import pytest

from cache.tiers.chunks import filled, memory, meta_of
from cache.tiers.lying_server import Answer, LyingServer, hangs, raw, says, trickles
from kvferry.cache.tiers.format import HEADER_BYTES, digest_of, encode
from kvferry.cache.tiers.remote import RemoteTier
from kvferry.errors import ChunkCorruptError, ChunkMissingError, TierError, TierFullError, TierUnavailableError

META = meta_of(1, 5000)
DATA = filled("these", 5000)
OBJECT = encode(META, digest_of(DATA)) + DATA
TIMEOUT_S = 1.0
SECRETS = ("AKIANOTFORLOGS", "never-to-be-seen", "session-unseen", "signature-unseen")
REFUSAL = b"""<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>AKIANOTFORLOGS</AWSAccessKeyId>
<StringToSign>never-to-be-seen signature-unseen (os error 28)</StringToSign></Error>"""
CHUNKED = b"""HTTP/1.1 200 OK\r\nETag: "x"\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"""


def tier_at(server: LyingServer) -> RemoteTier:
    options = {
        "endpoint": server.endpoint,
        "region": "us-east-1",
        "access_key_id": "AKIANOTFORLOGS",
        "secret_access_key": "never-to-be-seen",
        "session_token": "session-unseen",
    }
    return RemoteTier("s3://bucket/prefix", options=options, timeout_s=TIMEOUT_S)


def call(tier: RemoteTier, what: str) -> None:
    if what == "read":
        tier.read(META, memory(META.nbytes))
    elif what == "write":
        tier.write(META, DATA)
    elif what == "find":
        tier.find([META.name])
    elif what == "delete":
        tier.delete([META.name])
    else:
        tier.delete_namespace(META.name.namespace)


def test_an_honest_answer_is_taken() -> None:
    with LyingServer(says("200 OK", OBJECT)) as server:
        into = memory(META.nbytes)
        tier_at(server).read(META, into)
        assert into == DATA
        assert tier_at(server).find([META.name]) == 1
        tier_at(server).write(META, DATA)
        assert server.num_requests == 3


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (says("200 OK", OBJECT[:-1]), ChunkCorruptError, "it has 9095 bytes instead of 9096"),
        (says("200 OK", OBJECT + b"x"), ChunkCorruptError, "it has 9097 bytes instead of 9096"),
        (says("200 OK", OBJECT, length=len(OBJECT) + 1), ChunkCorruptError, "9097 bytes instead of 9096"),
        (says("200 OK", OBJECT, length=1 << 50), ChunkCorruptError, "bytes instead of 9096"),
        (says("200 OK", OBJECT[:10], length=10), ChunkCorruptError, "it has 10 bytes instead of 9096"),
        (says("200 OK", b"y" * len(OBJECT)), ChunkCorruptError, "does not begin as a KVferry chunk does"),
        (says("200 OK", OBJECT[:-1] + b"x"), ChunkCorruptError, "checksum"),
        (says("200 OK", OBJECT[:-1], length=len(OBJECT)), TierUnavailableError, "the answer broke off"),
        (says("200 OK", OBJECT[:5000], length=len(OBJECT)), TierUnavailableError, "the answer broke off"),
        (hangs(says("200 OK", OBJECT[:-1], length=len(OBJECT))), TierUnavailableError, "no answer in time"),
        (raw(CHUNKED), TierUnavailableError, "cannot be used"),
        (says("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>"), ChunkMissingError, "has no kvferry-1/"),
        (says("404 Not Found", b"<Error><Code>NoSuchBucket</Code></Error>"), TierUnavailableError, "does not exist"),
    ],
)
def test_reading_what_is_not_the_chunk(answer: Answer, error: type[TierError], text: str) -> None:
    with LyingServer(answer) as server, pytest.raises(error, match=text):
        call(tier_at(server), "read")


ALL = ("read", "write", "find", "delete", "clear")


@pytest.mark.parametrize("what", ALL)
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (hangs(), "no answer in time"),
        (says("500 Internal Server Error", b"oops"), "status 500 Internal Server Error"),
        (says("503 Slow Down"), "status 503"),
        (says("403 Forbidden", REFUSAL), "status 403 Forbidden"),
        (raw(b"this is no http\r\n\r\n"), "the connection broke"),
        (raw(b""), "the connection broke"),
    ],
    ids=["hangs", "500", "503", "403", "no HTTP", "hangs up"],
)
def test_every_call_ends_in_time_and_tells_no_secret(
    what: str, answer: Answer, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with LyingServer(answer) as server:
        tier = tier_at(server)
        began = time.monotonic()
        with pytest.raises(TierUnavailableError, match=f"at s3://bucket/prefix failed: {text}") as caught:
            call(tier, what)
        assert time.monotonic() - began < 15 * TIMEOUT_S  # it is an end that is shown here, not how fast it comes
        assert 1 <= server.num_requests <= 3
        assert any(b"AKIANOTFORLOGS" in head for head in server.heads)  # they were in use
    told = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(tier)
    assert not [secret for secret in SECRETS if secret in told]


def test_a_body_that_trickles_ends_in_time() -> None:
    with LyingServer(trickles) as server:
        tier = tier_at(server)
        meta = meta_of(1, (1 << 20) - HEADER_BYTES)
        with pytest.raises(TierUnavailableError, match="no answer in time"):
            tier.read(meta, memory(meta.nbytes))


def test_a_store_without_room_is_full() -> None:
    with LyingServer(says("507 Insufficient Storage")) as server, pytest.raises(TierFullError, match="status 507"):
        call(tier_at(server), "write")


def test_a_code_from_the_server_is_passed_on() -> None:
    text = r"status 403 Forbidden, SignatureDoesNotMatch$"
    with LyingServer(says("403 Forbidden", REFUSAL)) as server, pytest.raises(TierUnavailableError, match=text):
        call(tier_at(server), "write")
