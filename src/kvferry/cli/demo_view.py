"""How the demo shows itself on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.cli.demo import DemoResult
from kvferry.cli.sizes import format_bytes

__all__ = ["show_end", "show_result", "show_steps"]


@contextlib.contextmanager
def show_steps(console: Console) -> Iterator[Callable[[str], None]]:
    """A spinner with the step under way; the steps before it stay above."""
    with console.status("starting") as status:

        def say(step: str) -> None:
            console.print(f"  {step}")
            status.update(step)

        yield say


def show_result(console: Console, result: DemoResult) -> None:
    """The closing table, and whether the promise held."""
    table = Table(title=f"One prompt of {result.prompt_tokens} tokens ({result.backend}, wrapper {result.wrapper})")
    table.add_column("engine B")
    table.add_column("tokens reused", justify="right")
    table.add_column("time to first token", justify="right")
    table.add_column("first tokens")
    rows = (
        ("computing everything", 0, f"{result.ttft_cold_ms:.1f} ms", result.tokens_cold),
        ("reusing A's KV", result.reused_tokens, f"{result.ttft_reused_ms:.1f} ms", result.tokens_reused),
        ("control: another prompt's KV", result.control_reused_tokens, "", result.tokens_control),
    )
    for name, reused, ttft, tokens in rows:
        table.add_row(name, str(reused), ttft, " ".join(str(token) for token in tokens[:8]))
    console.print(table)
    verdict = "equal" if result.tokens_equal else "DIFFERENT"
    console.print(
        f"With reuse and without: {len(result.tokens_cold)} tokens, {verdict}; "
        f"first token {result.ttft_cold_ms / result.ttft_reused_ms:.1f} times sooner."
    )
    if result.memory_back_ms is not None:
        console.print(
            f"Engine A was killed with {format_bytes(result.memory_back_bytes)} in use; "
            f"they were free again {result.memory_back_ms:.1f} ms later."
        )
    show_end(console, result.broken_promises(), result.seconds)


def show_end(console: Console, broken_promises: list[str], seconds: float) -> None:
    """What did not hold, and how long all took."""
    for text in broken_promises:
        console.print(f"[bold red]BROKEN:[/] {escape(text)}")
    console.print(f"{seconds:.1f} s in all.")
