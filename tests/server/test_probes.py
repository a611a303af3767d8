"""What the server reads to prove that it maps an engine's memory: where it is told, and only inside of it."""

from __future__ import annotations

import pytest
import torch

from kvferry.errors import WireError
from kvferry.ipc.wire import encode_descriptors, fd_slots
from kvferry.protocol.messages import NONCE_BYTES
from kvferry.server.work.opened import OpenedCache
from kvferry.server.work.tasks import OpenTask
from serving.storages import storages_of

SHAPE = (2, 8, 16, 2, 8)
NBYTES = 2 * 8 * 16 * 2 * 8 * 4


def open_two(probes: tuple[int, ...]) -> tuple[tuple[bytes, ...], list[bytes]]:
    """What the server reads of two storages, and all that they hold."""
    layers = {f"layer.{number}": torch.randn(SHAPE) for number in range(2)}
    storages = storages_of(layers)
    try:
        slots = fd_slots(storages.wrappers)
        wrappers = encode_descriptors(storages.wrappers)
        cache = OpenedCache(OpenTask(1, storages.layout, "", wrappers, len(slots), b"", 0, probes))
        try:
            cache.take_fds([wrapper.export_fd(index) for wrapper, index in slots])
            return cache.finish(), [flat.numpy().tobytes() for flat in storages.flats]
        finally:
            cache.close()
    finally:
        storages.close()


@pytest.mark.parametrize("probes", [(), (0, 0), (64, 4096), (1, NBYTES - NONCE_BYTES), (NBYTES - 1, 3)])
def test_probes_are_read_where_they_are(probes: tuple[int, ...]) -> None:
    read, held = open_two(probes)
    assert len(held[0]) == NBYTES
    places = probes or (0, 0)
    assert list(read) == [data[at : at + NONCE_BYTES] for data, at in zip(held, places, strict=True)]


@pytest.mark.parametrize("probes", [(0,), (0, 0, 0), (NBYTES, 0), (0, 1 << 61)])
def test_probes_outside_are_refused_before_anything_is_opened(probes: tuple[int, ...]) -> None:
    with pytest.raises(WireError, match=r"probes at .* of 2 storages"):
        open_two(probes)
