"""How `kvferry demo --p2p` shows itself on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.cli.demo_p2p import P2pDemoResult
from kvferry.cli.demo_view import show_end
from kvferry.cli.sizes import format_bytes

__all__ = ["show_p2p_result"]


def show_p2p_result(console: Console, result: P2pDemoResult) -> None:
    """The closing table, the transfer, and whether the promises held."""
    places = " to ".join(result.devices)
    table = Table(title=f"One prompt of {result.prompt_tokens} tokens (carrier {result.carrier}, {places})")
    table.add_column("decode engine")
    table.add_column("KV received", justify="right")
    table.add_column("first token after", justify="right")
    table.add_column("tokens")
    rows = (
        ("reads it itself", 0, f"{result.ttft_alone_ms:.1f} ms", result.tokens_alone),
        ("prefill engine reads", result.received_tokens, f"{result.ttft_p2p_ms:.1f} ms", result.tokens_p2p),
        ("another's KV (control)", result.control_received_tokens, "", result.tokens_control),
        ("after the kill", 0, "", result.tokens_killed),
    )
    for name, received, ttft, tokens in rows:
        table.add_row(name, f"{received} tokens", ttft, " ".join(str(token) for token in tokens[:6]))
    console.print(table)
    verdict = "equal" if result.tokens_equal else "DIFFERENT"
    console.print(
        f"With the other engine's KV and without: {len(result.tokens_alone)} tokens, {verdict}. Of the time to first "
        f"token, {result.last_layer_ms:.1f} ms lie between the last layer computed and its last byte landed, "
        f"{result.after_landing_ms:.1f} ms between that and the token."
    )
    console.print(
        f"All layers at once: {format_bytes(result.transfer_bytes)} in {result.transfer_s * 1e3:.1f} ms, "
        f"{result.transfer_gb_s:.2f} GB/s, by {result.carrier}."
    )
    if result.not_better_because:
        console.print(f"No better carrier: {escape(result.not_better_because)}")
    if result.killed_reason is not None:
        console.print(
            f"Killed with {result.killed_after_layers} of {result.num_layers} layers landed; the decode engine learned "
            f"it {result.killed_learned_ms:.1f} ms later ({escape(result.killed_reason)}) and read the prompt itself: "
            f"{'the same tokens' if result.killed_tokens_equal else 'OTHER TOKENS'}."
        )
    show_end(console, result.broken_promises(), result.seconds)
