"""Threads that call anything at any time while servers die and connections are lost; and forks in the midst of it."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvferry.client import CacheClient
from kvferry.client import connection as connection_module
from kvferry.errors import RequestError, ServerGoneError
from kvferry.ipc import allocate_shared
from serving.engine_side import BLOCK_SIZE, CHUNK_BLOCKS, CHUNK_TOKENS, FORMAT, prompt
from serving.process import Stage, eventually

NUM_THREADS = 4
NUM_LOSSES = 16
TOKENS = prompt(1, 2 * CHUNK_TOKENS)
BLOCKS = list(range(2 * CHUNK_BLOCKS))
OTHERS = list(range(40, 40 + 2 * CHUNK_BLOCKS))


class Engine:
    """Calls of one engine, any of which may come at any time; what they may raise for that, and nothing else."""

    def __init__(self, client: CacheClient) -> None:
        self.client = client
        self.cache = allocate_shared((2, 64, BLOCK_SIZE, 8, 8), torch.float32)
        self.cache.copy_(torch.arange(self.cache.numel(), dtype=torch.float32).view(self.cache.shape))
        self.over = threading.Event()
        self.surprises: list[BaseException] = []
        self.num_calls = 0

    def register(self) -> None:
        self.client.register_kv_caches({"layer": self.cache}, engine_id="e", model="m", format=FORMAT)

    def store(self) -> None:
        self.client.store(TOKENS, BLOCKS, request_id="r").cancel(30)

    def lookup(self) -> None:
        self.client.release(self.client.lookup("r", TOKENS).lease_id)

    def fork(self) -> None:
        """The child can do nothing with the client, and its end does the parent no harm."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self.client.ping()
            except ServerGoneError as error:
                status = 0 if "parent process" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0

    def run(self, seed: int) -> None:
        dice = random.Random(seed)
        calls: list[Callable[[], Any]] = [
            self.register,
            self.register,
            self.store,
            self.store,
            self.lookup,
            self.lookup,
            self.client.unregister,
            self.fork,
            lambda: self.client.prefetch(TOKENS),
            lambda: self.client.attach("e"),
            lambda: repr(self.client),
        ]
        while not self.over.is_set():
            try:
                dice.choice(calls)()
            except ServerGoneError:
                pass  # of attach
            except ValueError as error:
                self.expect("no KV caches" in str(error) or "no engine" in str(error), error)
            except RequestError as error:  # where another thread has just unregistered
                self.expect(error.code in ("attach", "register"), error)
            except BaseException as error:  # noqa: BLE001 - the test tells
                self.surprises.append(error)
            self.num_calls += 1

    def expect(self, expected: bool, error: BaseException) -> None:
        if not expected:
            self.surprises.append(error)


def test_calls_of_many_threads_while_servers_come_and_go(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(connection_module, "LAST_PAUSE_S", 0.05)
    num_threads = threading.active_count()
    client = CacheClient(stage.url)
    engine = Engine(client)
    threads = [threading.Thread(target=engine.run, args=(seed,)) for seed in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    dice = random.Random(7)
    for number in range(NUM_LOSSES):
        time.sleep(0.05 + dice.random() * 0.1)
        if number % 2:
            stage.server.kill()
            eventually(lambda: not stage.server.alive)
            stage.start_server()
        elif (link := client._connection.link()) is not None:
            link._hang_up("lost by the test")
    engine.over.set()
    for thread in threads:
        thread.join(40)
    assert not any(thread.is_alive() for thread in threads)
    assert engine.surprises == []
    engine.register()
    eventually(lambda: client.connected and client.stats()["memory_bytes"] >= 16 << 20)
    registration = client._presence.registration
    assert registration is not None
    eventually(lambda: client.stats()["sessions"] == 1)
    assert client.stats()["engines"] == 1
    assert len(stage.server.memfd_inodes()) == len(set(stage.server.memfd_inodes()))
    assert registration.ring.in_use == 0
    client.store(TOKENS, BLOCKS).wait(10)
    client.retrieve(client.lookup("q", TOKENS).lease_id, OTHERS).wait(10)
    assert torch.equal(engine.cache[:, OTHERS], engine.cache[:, BLOCKS])
    client.close()
    eventually(lambda: threading.active_count() == num_threads)


@pytest.mark.parametrize("number", range(4))
def test_closing_in_the_midst_of_it(stage: Stage, number: int) -> None:
    """Of all that two threads are doing, nothing hangs, and nothing is left registered."""
    client = CacheClient(stage.url)
    engine = Engine(client)
    threads = [threading.Thread(target=engine.run, args=(10 * number + seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    dice = random.Random(number)
    time.sleep(dice.random() * 0.1)
    if number % 2:
        stage.server.kill()
    time.sleep(dice.random() * 0.02)
    client.close()
    engine.over.set()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert [error for error in engine.surprises if "closed" not in str(error)] == []
    if not number % 2:
        with CacheClient(stage.url) as other:
            eventually(lambda: other.stats()["sessions"] == 1)
            assert other.stats()["engines"] == 0
