"""Engines over TCP: GPU memory by handles alone (the driver's double), silence and death, ports and addresses."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.client.handshake import connect
from kvferry.client.url import parse_url
from kvferry.config import ServerConfig
from kvferry.errors import ShareError
from kvferry.layout import KVLayout, Plane
from kvferry.protocol.address import TcpAddress
from kvferry.protocol.messages import Error, FdBatch, Ping, Pong, Register
from kvferry.server import CacheServer
from kvferry.server.net.listener import TcpListener
from serving.engine_side import CHUNK_TOKENS
from serving.process import SideError, Zygote, eventually, freeze
from serving.tcp import TcpStage, tcp_stage
from serving.tokens import TOKENS, text_of, token_file, token_server, welcomed

BLOCKS = [7, 3, 11, 0, 5, 1, 2, 4, 9, 8, 6, 10]
TOKENS_ASKED = 3 * CHUNK_TOKENS
A = TOKENS["a"]


@pytest.fixture
def gpus(zygote: Zygote, tmp_path: Path) -> Iterator[TcpStage]:
    with tcp_stage(zygote, tmp_path, device="cuda", double=True) as made:
        yield made


def test_gpu_memory_is_shared_by_handles_alone(gpus: TcpStage) -> None:
    first = gpus.engine(register={"engine_id": "a"}, device="double")
    gpus.stage.wait_for_memory(first)
    want = first.call("fill", blocks=BLOCKS, seed=1)["digest"]
    assert first.call("store", seed=1, num_tokens=TOKENS_ASKED, blocks=BLOCKS)["stored"] == 3
    other = gpus.engine(register={"engine_id": "b"}, device="double")
    found = other.call("lookup", seed=1, num_tokens=TOKENS_ASKED)
    assert found["tokens"] == TOKENS_ASKED
    target = list(range(40, 52))
    assert other.call("retrieve", lease=found["lease"], blocks=target)["failed"] == []
    assert other.call("digest", blocks=target)["digest"] == want
    # Two mappings an engine: its cache, and the words of its events.
    assert gpus.mapped() == 4
    for engine in (first, other):
        engine.call("unregister")
    assert gpus.mapped() == 0


def test_tenants_are_apart(gpus: TcpStage) -> None:
    first = gpus.engine("a", register={"engine_id": "x"}, device="double")
    gpus.stage.wait_for_memory(first)
    assert first.call("store", seed=1, num_tokens=TOKENS_ASKED, blocks=BLOCKS)["stored"] == 3
    for other in (
        gpus.engine("b", register={"engine_id": "x"}, device="double"),
        gpus.stage.engine(register={"engine_id": "x"}, device="double"),
    ):
        assert other.call("lookup", seed=1, num_tokens=TOKENS_ASKED)["tokens"] == 0
    same = gpus.stage.engine(register={"engine_id": "y"}, device="double", token=text_of(A))  # on the Unix socket
    assert same.call("lookup", seed=1, num_tokens=TOKENS_ASKED)["tokens"] == TOKENS_ASKED


def test_a_killed_engines_memory_is_given_back(gpus: TcpStage) -> None:
    watcher = gpus.engine(register={}, device="double")
    gpus.stage.wait_for_memory(watcher)
    before = gpus.stage.server.fds()
    victim = gpus.engine(register={"engine_id": "victim"}, device="double")
    victim.call("store", seed=2, num_tokens=TOKENS_ASKED, blocks=BLOCKS, wait=False)
    victim.kill()  # its kernel says so
    eventually(lambda: gpus.mapped() == 0, 2)
    eventually(lambda: watcher.call("stats")["stats"]["sessions"] == 1, 2)  # of its own tenant
    assert gpus.stage.server.fds() == before


def test_silence_is_a_death_and_heartbeats_are_a_life(zygote: Zygote, tmp_path: Path) -> None:
    """A stopped process does not hang up: its memory is given back all the same; and it comes back by itself."""
    with tcp_stage(zygote, tmp_path, device="cuda", double=True, patience={"heartbeat_s": 1.0}) as gpus:
        quiet = gpus.engine(register={"engine_id": "quiet"}, device="double")
        gpus.stage.wait_for_memory(quiet)
        stopped = gpus.engine(register={"engine_id": "stopped"}, device="double")
        assert gpus.mapped() == 4
        freeze(stopped.pid)
        try:
            eventually(lambda: gpus.mapped() == 2, 10)
            # The other one had nothing to say either, for as long.
            eventually(lambda: quiet.call("stats")["stats"]["sessions"] == 1, 5)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        stats = gpus.stage.engine(register={}).call("stats")["stats"]
        assert stats["sessions_silent"] == 1
        assert stats["sessions_broken"] == 0
        eventually(lambda: gpus.mapped() == 4, 10)
        assert stopped.call("store", seed=1, num_tokens=TOKENS_ASKED, blocks=BLOCKS)["stored"] == 3


def test_host_memory_is_refused_by_name(zygote: Zygote, tmp_path: Path) -> None:
    with tcp_stage(zygote, tmp_path) as stage:
        engine = stage.engine(register={})
        with pytest.raises(SideError, match=r"TCP carries none.*vmm.*host memory.*\[transport\]"):
            engine.call("register")
        assert engine.call("stats")["stats"]["sessions"] == 1  # the session lives
        stats = stage.stage.engine(register={}).call("stats")["stats"]
        assert stats["registrations_refused_transport"] == 1


LAYOUT = KVLayout(
    format="f", block_size=16, num_blocks=8, dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1,
    planes=(Plane(0, 0, 64, 64),),
)  # fmt: skip


@pytest.mark.parametrize(("num_fds", "num_event_fds"), [(1, 0), (0, 1)])
def test_what_needs_descriptors_is_refused_before_any_is_awaited(
    tmp_path: Path, num_fds: int, num_event_fds: int
) -> None:
    with token_server(tmp_path) as served, contextlib.closing(welcomed(served.tcp, A)) as raw:
        raw.send(Register(1, "e", "m", 0, 1, 16, "", LAYOUT, b"", num_fds, b"", num_event_fds))
        error = raw.reply()
        assert isinstance(error, Error)
        assert (error.seq, error.code) == (1, "transport")
        raw.send(Ping(2))
        assert raw.reply() == Pong(2)
        raw.send(FdBatch(3, 1))
        error = raw.reply()
        assert isinstance(error, Error)
        assert error.code == "protocol"


def ipv6_missing() -> str | None:
    """Why there is no IPv6 loopback here, or None."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        return f"no IPv6 loopback: {error}"
    return None


IPV6 = pytest.param("tcp://[::1]:0", marks=pytest.mark.skipif(ipv6_missing() is not None, reason=str(ipv6_missing())))


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", IPV6, "tcp://localhost:0", "tcp://:0"])
def test_port_0_is_any_port_and_it_is_told(tmp_path: Path, listen: str) -> None:
    with token_server(tmp_path, listen=listen) as served:
        address = parse_url(served.tcp)
        assert isinstance(address, TcpAddress)
        assert address.port > 0
        assert address.host in ("127.0.0.1", "::1")
        raw = welcomed(served.tcp, A)
        raw.send(Ping(1))
        assert raw.reply() == Pong(1)
        raw.close()


def test_servers_that_start_together_get_ports_of_their_own() -> None:
    for _ in range(50):
        made: list[TcpListener] = []
        threads = [
            threading.Thread(target=lambda made=made: made.append(TcpListener(TcpAddress("127.0.0.1", 0))))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({str(listener.address) for listener in made}) == 2
        for listener in made:
            connect(listener.address, 5).close()
            listener.close()
            listener.close()


def test_an_address_that_is_taken_or_is_not_ours_is_named(tmp_path: Path) -> None:
    with token_server(tmp_path) as served:
        taken = parse_url(served.tcp)
        assert isinstance(taken, TcpAddress)
        with pytest.raises(ShareError, match=rf"cannot listen at {taken}: .*in use.*port, or 0"):
            TcpListener(taken)
    listener = TcpListener(taken)  # at once: what the old server's connections left does not matter
    listener.close()
    for address in (TcpAddress("host.invalid", 0), TcpAddress("192.0.2.1", 0)):
        with pytest.raises(ShareError, match=f"cannot listen at tcp://{address.host}"):
            TcpListener(address)


def test_only_an_address_beyond_loopback_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    TcpListener(TcpAddress("127.0.0.1", 0)).close()
    TcpListener(TcpAddress("localhost", 0)).close()
    assert not caplog.records
    listener = TcpListener(TcpAddress("0.0.0.0", 0))
    assert "nothing is encrypted" in caplog.text
    assert str(listener.address) in caplog.text
    listener.close()


def test_a_server_that_cannot_listen_at_tcp_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(
            socket_path=str(path),
            listen=f"tcp://127.0.0.1:{taken.getsockname()[1]}",
            token_file=token_file(tmp_path),
            memory_bytes=1 << 20,
            device="cpu",
        )
        with pytest.raises(ShareError, match="cannot listen"):
            CacheServer(config).start()
    assert not path.exists()


def test_a_token_file_that_is_not_right_keeps_the_server_from_starting(tmp_path: Path) -> None:
    tokens = token_file(tmp_path)
    os.chmod(tokens, 0o644)
    config = ServerConfig(
        socket_path=str(tmp_path / "s"),
        listen="tcp://127.0.0.1:0",
        token_file=tokens,
        memory_bytes=1 << 20,
        device="cpu",
    )
    with pytest.raises(ValueError, match="chmod 600"):
        CacheServer(config).start()
    assert not (tmp_path / "s").exists()
