"""The end of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

__all__ = ["end_tasks"]

_AGAIN_S = 1.0


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and return when all have ended, however; what they raised is nobody's concern any more.

    Before Python 3.12 `asyncio.wait_for` loses a cancellation that comes as it ends, so they are told again.
    """
    going_on = {task for task in tasks if not task.done()}
    while going_on:
        for task in going_on:
            task.cancel()
        _, going_on = await asyncio.wait(going_on, timeout=_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()
