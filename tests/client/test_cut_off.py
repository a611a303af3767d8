"""CacheClient without a server, for a while or from the start: what its calls do, and what is there when one comes."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from doubles.link_server import Server
from kvferry.client import CacheClient, Lookup, Prefetch
from kvferry.client import connection as connection_module
from kvferry.errors import ServerGoneError
from kvferry.ipc import allocate_shared, process_table
from kvferry.protocol.messages import Message, Welcome
from serving.engine_side import BLOCK_SIZE, CHUNK_BLOCKS, CHUNK_TOKENS, FORMAT, link_of, prompt
from serving.process import Stage, Zygote, eventually

TOKENS = prompt(1, 2 * CHUNK_TOKENS)
BLOCKS = list(range(2 * CHUNK_BLOCKS))


@pytest.fixture
def stage(zygote: Zygote, tmp_path: Path) -> Iterator[Stage]:
    """A server has been there, and was killed; `start_server` makes another."""
    made = Stage(zygote, tmp_path)
    kill(made)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(connection_module, "LAST_PAUSE_S", 0.02)


def make_cache() -> torch.Tensor:
    cache = allocate_shared((2, 64, BLOCK_SIZE, 8, 8), torch.float32)
    return cache.copy_(torch.arange(cache.numel(), dtype=torch.float32).view(cache.shape))


def register(client: CacheClient, cache: torch.Tensor, **changes: object) -> None:
    names: dict[str, object] = {"engine_id": "here", "model": "m", "format": FORMAT}
    client.register_kv_caches({"layer": cache}, **{**names, **changes})  # type: ignore[arg-type]


def ready(client: CacheClient) -> bool:
    """Connected, and the server's memory is there."""
    return client.connected and client.stats()["memory_bytes"] >= 16 << 20


def kill(stage: Stage) -> None:
    stage.server.kill()
    eventually(lambda: not stage.server.alive)


def test_a_client_may_come_before_its_server(stage: Stage) -> None:
    with pytest.raises(ServerGoneError, match=r"no server answers at .*kv\.sock"):
        CacheClient(stage.url)
    with CacheClient(stage.url, required=False) as client, CacheClient(stage.url, required=False) as scheduler:
        cache = make_cache()
        before = cache.clone()
        register(client, cache)
        with pytest.raises(ServerGoneError, match="no server answers"):
            scheduler.attach("here")
        assert (client.connected, client.incarnation, client.chunk_tokens) == (False, b"", CHUNK_TOKENS)
        assert "cut off" in repr(client)
        assert scheduler.lookup("r", TOKENS) == (0, 0, 0)
        stage.start_server()
        eventually(lambda: ready(client) and ready(scheduler))
        assert torch.equal(cache, before)
        client.store(TOKENS, BLOCKS).wait(10)
        cache.zero_()
        found = scheduler.lookup("r", TOKENS)
        assert found.tokens == len(TOKENS)
        client.retrieve(found.lease_id, BLOCKS).wait(10)
        assert torch.equal(cache[:, : len(BLOCKS)], before[:, : len(BLOCKS)])
        assert len(client.incarnation) == 16
        assert "open" in repr(client)


def test_calls_while_there_is_no_server(stage: Stage) -> None:
    stage.start_server()
    with CacheClient(stage.url) as client:
        register(client, make_cache())
        kill(stage)
        eventually(lambda: not client.connected)
        assert client.lookup("r", TOKENS, wait_s=1.0) == Lookup(0, 0, 0)
        assert client.prefetch(TOKENS) == Prefetch(0, 0)
        client.release(1)
        client.end_request("r")
        for job in (client.store(TOKENS, BLOCKS), client.retrieve(7, BLOCKS, BLOCK_SIZE)):
            assert job.done()
            assert isinstance(job.error, ServerGoneError)
            assert job.cancel() is True
        assert job.failed_block_ids == tuple(BLOCKS[1:])
        calls: list[Callable[[], object]] = [client.stats, client.ping, client.clear, lambda: client.attach("here")]
        for call in calls:
            with pytest.raises(ServerGoneError, match="trying to connect again"):
                call()
        with pytest.raises(ValueError, match="other KV caches"):
            register(client, make_cache())
        client.unregister()
        with pytest.raises(ValueError, match="no KV caches"):
            client.store(TOKENS, BLOCKS)
        with pytest.raises(ValueError, match="attach"):
            client.lookup("r", TOKENS)
        register(client, make_cache(), engine_id="other")
        stage.start_server()
        eventually(lambda: ready(client))
        assert client.stats()["engines"] == 1


def test_calls_after_close_say_that_it_was_closed(stage: Stage) -> None:
    stage.start_server()
    client = CacheClient(stage.url)
    register(client, make_cache())
    client.close()
    calls: list[Callable[[], object]] = [
        client.ping,
        client.stats,
        client.clear,
        lambda: client.attach("e"),
        lambda: client.lookup("r", TOKENS),
        lambda: client.prefetch(TOKENS),
        lambda: client.store(TOKENS, BLOCKS),
        lambda: client.retrieve(1, BLOCKS),
        lambda: register(client, make_cache()),
    ]
    for call in calls:
        with pytest.raises(ServerGoneError, match=r"^this client was closed; make a new one$"):
            call()
    client.release(1)
    client.end_request("r")
    client.unregister()
    client.close()
    assert "closed" in repr(client)


def test_nothing_is_left_of_many_connections(stage: Stage) -> None:
    """The server lives, and is the same; the connection is lost again and again."""
    stage.start_server()
    cache = make_cache()
    with CacheClient(stage.url) as client:
        register(client, cache)
        eventually(lambda: ready(client))
        client.store(TOKENS, BLOCKS).wait(10)
        incarnation = client.incarnation
        registration = client._presence.registration
        before: list[object] = []
        for number in range(150):
            link = link_of(client)
            link._hang_up("lost by the test")
            eventually(lambda: client.connected)
            if number in (20, 149):
                assert client.lookup("r", TOKENS).tokens == len(TOKENS)
                eventually(lambda link=link: link.ended and client.stats()["sessions"] == 1)  # type: ignore[misc]
                gc.collect()
                before.append(
                    (
                        len(os.listdir("/proc/self/fd")),
                        threading.active_count(),
                        len(process_table().exports),
                        stage.server.fds(),
                        stage.server.memfd_inodes(),
                    )
                )
        assert before[0] == before[1]
        assert client.incarnation == incarnation
        assert client._presence.registration is registration
        assert len(client._connection._former) <= 2
        assert client.stats()["registrations"] == 151


def test_events_are_given_back_when_the_server_is_gone(stage: Stage) -> None:
    stage.start_server()
    with CacheClient(stage.url) as client:
        register(client, make_cache())
        registration = client._presence.registration
        assert registration is not None
        ring = registration.ring
        ring._signal = lambda ticket, stream: None  # type: ignore[method-assign]
        jobs = [client.store(prompt(number, CHUNK_TOKENS), BLOCKS) for number in range(ring.slots)]
        assert ring.in_use == ring.slots
        kill(stage)
        for job in jobs:
            with pytest.raises(ServerGoneError):
                job.wait(10)
        assert ring.in_use == 0


def test_a_refusal_is_tried_again_and_said_once(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Such as by a rank that is taken still: by a zombie of ourselves, whose end the server has not noticed."""
    with CacheClient(stage.url, required=False) as client:
        register(client, make_cache())
        with client._connection.exclusive(interrupt=False):
            stage.start_server()
            other = stage.engine(register={"engine_id": "here"})
        eventually(lambda: "rank_taken" in str(client._connection.gone()))
        seen = client._connection.gone()
        with pytest.raises(ServerGoneError, match=r"\[rank_taken\]; trying to connect again"):
            client.ping()
        assert client.lookup("r", TOKENS) == (0, 0, 0)
        refused = other.call("stats")["stats"]["registrations_refused"]
        eventually(lambda: other.call("stats")["stats"]["registrations_refused"] > refused + 3)
        other.kill()
        eventually(lambda: client.connected)
    assert seen.args
    told = [record for record in caplog.records if "rank_taken" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING]


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[Server]:
    """A server that is silent after what it is told to say."""
    made = Server(tmp_path / "mute")
    yield made
    made.close()


@pytest.mark.parametrize("said", [[], [Welcome(2, b"i" * 16)]])
@pytest.mark.parametrize("call", ["close", "unregister", "register"])
def test_a_silent_server_holds_up_nobody(mute: Server, tmp_path: Path, said: list[Message], call: str) -> None:
    threads = threading.active_count()
    path = tmp_path / "none"
    client = CacheClient(str(path), timeout_s=30, required=False)
    cache = make_cache()
    register(client, cache)
    greeting = mute.greet(*said)
    path.symlink_to(tmp_path / "mute")
    greeting.join(10)
    if said:
        eventually(lambda: client._connection._attempt is not None)
    started = time.monotonic()
    assert client.lookup("r", TOKENS) == (0, 0, 0)
    if call == "unregister":
        client.unregister()
    if call == "register":
        register(client, cache)
    client.close()
    assert time.monotonic() - started < 5
    eventually(lambda: threading.active_count() == threads)


def test_an_unclosed_client_that_is_cut_off_warns_and_its_thread_ends(stage: Stage) -> None:
    clients = [CacheClient(stage.url, required=False)]
    thread = clients[0]._connection._thread
    assert thread is not None
    with pytest.warns(ResourceWarning, match="cut off> was not closed"):
        clients.clear()
    eventually(lambda: not thread.is_alive())


def test_a_forked_child_of_one_that_is_cut_off(stage: Stage) -> None:
    with CacheClient(stage.url, required=False) as client:
        register(client, make_cache())
        for number in range(5):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    client.lookup("r", TOKENS)
                except ServerGoneError as error:
                    status = 0 if "parent process" in str(error) else 2
                finally:
                    client.close()
                    os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
            if number == 2:
                stage.start_server()
        eventually(lambda: ready(client))
        client.store(TOKENS, BLOCKS).wait(10)
