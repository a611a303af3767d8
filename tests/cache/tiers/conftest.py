"""A real S3 endpoint on loopback, in a process of its own."""

from __future__ import annotations

import itertools
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvferry.cache.tiers.remote import RemoteTier

_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass
class S3:
    """The endpoint, which has one bucket; each tier that it makes has a prefix of its own."""

    endpoint: str
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def options(self) -> dict[str, str]:
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": "AKIAKVFERRYTESTS",
            "secret_access_key": "never-to-be-seen",
        }

    def url(self) -> str:
        return f"s3://chunks/of/tier-{next(self.numbers)}"

    def tier(self, url: str | None = None) -> RemoteTier:
        return RemoteTier(url or self.url(), options=self.options, timeout_s=20)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/chunks", method="PUT"), timeout=20):
            pass
        yield S3(endpoint)
    finally:
        server.stdin.close()
        server.stdout.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(10)
