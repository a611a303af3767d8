"""The bytes of a ring of events: only what is whole and consistent is opened."""

from __future__ import annotations

import os
import pickle
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doubles.host_files import count_fds
from kvferry.errors import KVFerryError, WireError
from kvferry.ipc import wire
from kvferry.ipc.events import encode_events, make_event_ring, open_event_ring, open_events
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.shared_memory import allocate_shared


def _good(slots: int = 2) -> tuple[bytes, list[int]]:
    """A ring that stays open for the length of the test run, by its file descriptor alone."""
    with make_event_ring(None, False, slots) as ring:
        return encode_events(ring)


def _page(dtype: torch.dtype = torch.int64, slots: int = 2) -> msgspec.msgpack.Ext:
    with HostIPCWrapper(allocate_shared((slots,), dtype)) as wrapper:
        return wire.enc_hook(wrapper)


def _fields() -> dict[str, Any]:
    data, fds = _good()
    wire.close_fds(fds)
    fields = msgspec.msgpack.decode(data)
    assert isinstance(fields, dict)
    return fields


def _bad() -> dict[str, bytes]:
    def changed(**changes: Any) -> bytes:
        return msgspec.msgpack.encode({**_fields(), **changes})

    data, fds = _good()
    wire.close_fds(fds)
    cuda = {"backend": "cuda", "device_uuid": "GPU-0", "page": []}
    return {
        "empty": b"",
        "a pickle": pickle.dumps(1),
        "trailing byte": data + b"\0",
        "truncated": data[:-1],
        "oversized": bytes((1 << 20) + 1),
        "version": changed(kvferry_events=2),
        "unknown field": changed(more=1),
        "unknown back end": changed(backend="disk"),
        "no slots": changed(slots=0),
        "too many slots": changed(slots=4097),
        "other slots than the page": changed(slots=3),
        "no page": changed(page=[]),
        "two pages": changed(page=[_page(), _page()]),
        "page of floats": changed(page=[_page(torch.float64)]),
        "page too small": changed(page=[_page(slots=1)]),
        "page as map": changed(page=[{}]),
        "host ring with a device": changed(device_uuid="GPU-0"),
        "host ring with handles": changed(handles=[bytes(64)] * 2),
        "cuda ring without handles": changed(**cuda),
        "cuda ring with a page": changed(backend="cuda", device_uuid="GPU-0", handles=[bytes(64)] * 2),
        "short handles": changed(**cuda, handles=[bytes(63)] * 2),
        "semaphores without a device": changed(backend="semaphore"),
        "of the waiter": changed(memory_of="waiter"),
    }


@pytest.mark.parametrize("name", list(_bad()))
def test_bad_bytes_are_one_error_and_leave_no_descriptor(name: str) -> None:
    data = _bad()[name]
    before = count_fds()
    with pytest.raises(WireError):
        open_events(data, [os.open("/dev/null", os.O_RDONLY)])
    assert count_fds() == before


@pytest.mark.parametrize("number", [0, 2])
def test_a_wrong_number_of_descriptors(number: int) -> None:
    before = count_fds()
    data, fds = _good()
    wire.close_fds(fds)
    with pytest.raises(WireError, match=f"needs 1 file descriptors, {number} came"):
        open_events(data, [os.open("/dev/null", os.O_RDONLY) for _ in range(number)])
    assert count_fds() == before


def test_a_ring_for_the_other_end_is_refused() -> None:
    data, fds = _good()
    with pytest.raises(WireError, match="recorder"):
        open_event_ring(data, fds)


_GOOD = _good()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_changed_bytes_are_refused_or_opened_and_leave_no_descriptor(data: st.DataObject) -> None:
    changed = bytearray(_GOOD[0])
    for position in data.draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=4)):
        changed[position] = data.draw(st.integers(0, 255))
    before = count_fds()
    try:
        events = open_events(bytes(changed), [os.dup(_GOOD[1][0])])
    except KVFerryError:  # a good descriptor may meet a wrong file, or there is no driver
        pass
    else:
        events.close()
    assert count_fds() == before
