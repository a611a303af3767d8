"""What stores cost the engine that they run beside: a loop of matrix products on the GPU, with and without them."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable, Iterator

import torch

from kvferry.cli.bench_report import Result

__all__ = ["bench_slowdown"]

SIZE, PRODUCTS, ROUNDS = 8192, 400, 5


def bench_slowdown(store_once: Callable[[], None]) -> Result:
    """Per cent by which the loop takes longer while `store_once` is called again and again from another thread."""
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    _loop_s(a, b, out)
    alone, beside = [], []
    for _ in range(ROUNDS):
        alone.append(_loop_s(a, b, out))
        with _repeating(store_once):
            beside.append(_loop_s(a, b, out))
    alone_s, beside_s = statistics.median(alone), statistics.median(beside)
    about = f"bf16 products of {SIZE}x{SIZE}, {beside_s * 1e3:.0f} ms beside stores, {alone_s * 1e3:.0f} ms alone"
    return Result("engine_slowdown", (beside_s / alone_s - 1) * 100, "%", None, beside_s / alone_s, about)


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
def _repeating(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` in a thread until the body ends; what it raised is raised here."""
    stop = threading.Event()
    failures: list[Exception] = []

    def repeat() -> None:
        try:
            while not stop.is_set():
                action()
        except (RuntimeError, OSError) as error:
            failures.append(error)

    thread = threading.Thread(target=repeat, name="stores")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    if failures:
        raise failures[0]
