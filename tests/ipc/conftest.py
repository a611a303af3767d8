"""What the tests of passing file descriptors share."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_of_other_modules() -> None:
    """What earlier modules left in cycles holds descriptors, which tests that count them must not see go."""
    gc.collect()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    with one, two:
        yield one, two


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor
