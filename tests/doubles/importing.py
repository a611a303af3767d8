"""The importing side of tests with a `Child` as the exporter."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import msgspec

from doubles.child import Child
from doubles.side import receive_wrapper_fds, unpack
from kvferry.cuda.memory import memory_info
from kvferry.ipc.table import process_table
from kvferry.ipc.wrapper import DeviceIPCWrapper


def opened(exported: dict[str, Any], **changes: Any) -> DeviceIPCWrapper:
    """The importing wrapper of what a child's `wrap` gave, with some fields changed."""
    wrapper = unpack(exported["kind"], exported["packed"])
    if not changes:
        return wrapper
    return type(wrapper).from_descriptor(msgspec.structs.replace(wrapper.descriptor, **changes))


def received(child: Child, name: str, exported: dict[str, Any]) -> DeviceIPCWrapper:
    """The importing wrapper with its file descriptors."""
    wrapper = opened(exported)
    child.ask("send_fds", name=name)
    receive_wrapper_fds(child.sock, wrapper)
    child.answer()
    return wrapper


def opens() -> int:
    """How many mappings this process has opened so far."""
    return process_table().mappings.stats().opens


def until(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def free_bytes(device: int = 0) -> int:
    return memory_info(device)[0]


def check_nothing_mapped() -> None:
    """For the end of a test: all that was released is unmapped, and nothing else is mapped."""
    gc.collect()
    process_table().mappings.drain()
    stats = process_table().mappings.stats()
    assert (stats.mapped, stats.close_failures) == (0, 0)
