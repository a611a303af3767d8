"""What stores cost the engine that they run beside: a loop of matrix products on the GPU, with and without them."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from kvferry.cli.bench_report import Result
from kvferry.errors import KVFerryError

__all__ = ["bench_slowdown"]

SIZE, PRODUCTS, ROUNDS = 8192, 400, 5


def bench_slowdown(store_once: Callable[[], None]) -> Result:
    """Per cent by which the loop takes longer while `store_once` is called again and again from another thread."""
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    _loop_s(a, b, out)
    alone, beside, stores = [], [], 0
    for _ in range(ROUNDS):
        alone.append(_loop_s(a, b, out))
        with _repeating(store_once) as times:
            beside.append(_loop_s(a, b, out))
            stores += len(times)
    if not stores:
        raise RuntimeError(f"no store ended within {sum(beside):.1f} s of matrix products: nothing was measured")
    alone_s, beside_s = statistics.median(alone), statistics.median(beside)
    about = f"bf16 products of {SIZE}x{SIZE}: {beside_s * 1e3:.1f} ms beside stores, {alone_s * 1e3:.1f} ms alone; "
    return Result("engine_slowdown", (beside_s / alone_s - 1) * 100, "%", about=f"{about}{stores} stores in all")


def _loop_s(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    """Seconds of the loop by the GPU's own clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(PRODUCTS):
        torch.mm(a, b, out=out)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@contextlib.contextmanager
def _repeating(action: Callable[[], None]) -> Iterator[Sequence[float]]:
    """Call `action` in a thread until the body ends; the times at which it returned. What it raised is raised here.

    On a stream of its own: on the loop's, each store would wait until all products queued so far are done.
    """
    stop = threading.Event()
    failures: list[Exception] = []
    ends: list[float] = []

    def repeat() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                while not stop.is_set():
                    action()
                    ends.append(time.perf_counter())
        except (KVFerryError, RuntimeError) as error:
            failures.append(error)

    thread = threading.Thread(target=repeat, name="stores")
    thread.start()
    try:
        yield ends
    finally:
        stop.set()
        thread.join(60)
    if failures:
        raise failures[0]
