"""KV from a prefill engine to a decode engine, shown.

Three processes: this one, the prefill engine (reads prompts and sends their KV) and the decode engine (receives it into
blocks of its own and answers). What must hold is checked: the decode engine's tokens equal those that it gives when it
reads the prompt itself, bit for bit; with another prompt's KV they do not; and when the prefill engine is killed in
mid-transfer they are equal again, since the decode engine learns of it and reads the prompt itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import torch

from kvferry.cli.demo import DemoConfig, Say
from kvferry.cli.demo_p2p_peer import HEARTBEAT_S, Await, Continue, Expect, Init, Prefill, SendAgain, Stats
from kvferry.reference.process import LineProcess
from kvferry.reference.worker import Command, Generate

__all__ = ["P2pDemoResult", "run_demo_p2p"]

Answered = dict[str, Any]

LEARNED_WITHIN_MS = 3 * HEARTBEAT_S * 1e3  # after that long a silence any peer is given up


@dataclasses.dataclass(frozen=True)
class P2pDemoResult:
    """What was measured.

    `alone`: the decode engine reads the prompt itself; `p2p`: the prefill engine does; `control`: with another prompt's
    KV; `killed`: the prefill engine is killed when `killed_after_layers` of `num_layers` have landed.
    """

    tokens_equal: bool
    control_equal: bool
    killed_tokens_equal: bool
    received_tokens: int
    control_received_tokens: int
    not_received_because: str | None
    prompt_tokens: int
    ttft_alone_ms: float
    ttft_p2p_ms: float
    last_layer_ms: float  # from the last layer computed to its last byte landed
    after_landing_ms: float  # from there to the first token
    transfer_bytes: int
    transfer_s: float  # of all layers at once, from the sender's call to the last byte landed
    transfer_gb_s: float
    carrier: str
    not_better_because: str
    killed_after_layers: int
    num_layers: int
    killed_learned_ms: float
    killed_reason: str | None
    backend: str
    devices: list[str]
    tokens_alone: list[int]
    tokens_p2p: list[int]
    tokens_control: list[int]
    tokens_killed: list[int]
    seconds: float

    def broken_promises(self) -> list[str]:
        """What did not hold, in words; empty where all did."""
        checks = {
            "tokens from the other engine's KV differ from the decode engine's own": not self.tokens_equal,
            "another prompt's KV gave the same tokens, so the comparison shows nothing": self.control_equal,
            f"no token's KV was received: {self.not_received_because}": self.received_tokens == 0,
            f"the control received no token's KV: {self.not_received_because}": self.control_received_tokens == 0,
            "the prefill engine was killed, but not in mid-transfer": self.killed_reason is None,
            "tokens after the prefill engine was killed differ": not self.killed_tokens_equal,
            f"the death was not noticed within {LEARNED_WITHIN_MS:.0f} ms": self.killed_learned_ms > LEARNED_WITHIN_MS,
        }
        return [text for text, broken in checks.items() if broken]


def run_demo_p2p(config: DemoConfig, carrier: str, say: Say) -> P2pDemoResult:
    """Run it all; `say` is told each step as it begins. All children have ended when this returns or raises."""
    started = time.monotonic()
    config = config.resolved()
    chunk = config.engine().chunk_tokens
    if config.prompt_tokens <= chunk:
        raise ValueError(f"a prompt of {config.prompt_tokens} tokens has nothing to send: give it more than {chunk}")
    prompt, other = config.prompts()
    with _Pair(config, carrier, say) as pair:
        pair.warm_up(other)
        p2p = pair.answer_p2p(prompt)
        alone = pair.answer_alone(prompt)
        control = pair.answer_control(prompt)
        carriers = pair.decode.call(Stats(), config.timeout_s)
        killed = pair.answer_killed(prompt)
    return P2pDemoResult(
        **_tokens(p2p, alone, control, killed),
        **_times(config, p2p, alone, control, killed),
        prompt_tokens=config.prompt_tokens,
        carrier=", ".join(carriers["carriers"]),
        not_better_because=carriers["why"],
        killed_after_layers=pair.num_layers // 2,
        num_layers=pair.num_layers,
        killed_reason=killed["failure"],
        backend="cuda" if config.device == "cuda" else "host",
        devices=pair.devices,
        seconds=time.monotonic() - started,
    )


def _tokens(p2p: Answered, alone: Answered, control: Answered, killed: Answered) -> dict[str, Any]:
    """The fields of the result that tell tokens."""
    return {
        "tokens_equal": p2p["tokens"] == alone["tokens"],
        "control_equal": control["tokens"] == alone["tokens"],
        "killed_tokens_equal": killed["tokens"] == alone["tokens"],
        "received_tokens": p2p["received_tokens"],
        "control_received_tokens": control["received_tokens"],
        "not_received_because": p2p["failure"] or control["failure"],
        "tokens_alone": alone["tokens"],
        "tokens_p2p": p2p["tokens"],
        "tokens_control": control["tokens"],
        "tokens_killed": killed["tokens"],
    }


def _times(config: DemoConfig, p2p: Answered, alone: Answered, control: Answered, killed: Answered) -> dict[str, Any]:
    """The fields of the result that tell times. All processes of one host share the monotonic clock."""
    transfer_bytes = control["received_tokens"] * config.engine().token_bytes
    transfer_s = control["ended_at"] - control["started_at"]
    return {
        "ttft_alone_ms": alone["ttft_ms"],
        "ttft_p2p_ms": _ms(p2p["started_at"], p2p["first_token_at"]),
        "last_layer_ms": _ms(p2p["computed_at"], p2p["ended_at"]),
        "after_landing_ms": _ms(p2p["ended_at"], p2p["first_token_at"]),
        "transfer_bytes": transfer_bytes,
        "transfer_s": transfer_s,
        "transfer_gb_s": transfer_bytes / transfer_s / 1e9,
        "killed_learned_ms": _ms(killed["killed_at"], killed["ended_at"]),
    }


class _Pair(contextlib.ExitStack):
    """Both engines, and what is asked of them, in the order of the methods."""

    def __init__(self, config: DemoConfig, carrier: str, say: Say) -> None:
        super().__init__()
        self._config, self._say = config, say
        self.num_layers = config.engine().model.num_layers
        self.devices = _devices(config.device)
        say("loading the model in the prefill engine and in the decode engine")
        try:
            self.prefill = self.enter_context(LineProcess("prefill engine", "kvferry.cli.demo_p2p_peer"))
            self.decode = self.enter_context(LineProcess("decode engine", "kvferry.cli.demo_p2p_peer"))
            self._address = self._start(carrier)
        except BaseException:
            self.close()
            raise

    def _start(self, carrier: str) -> str:
        """Build both engines at once; the decode engine's address."""
        for seed, (process, device) in enumerate(zip((self.prefill, self.decode), self.devices, strict=True)):
            engine = dataclasses.replace(self._config.engine(), device=device, shuffle_seed=seed)
            process.begin(Init(engine=engine, carrier=carrier), self._config.timeout_s)
        self.prefill.finish(self._config.timeout_s)
        return str(self.decode.finish(self._config.timeout_s)["address"])

    def warm_up(self, other: list[int]) -> None:
        """Every path once, so that the timed ones meet equal conditions; the control takes the KV that this leaves."""
        self._say("warming up on another prompt, which both read")
        self._expect("other", other)
        self.prefill.begin(Prefill(transfer="other", tokens=other, to=self._address))
        self._decode(Generate(tokens=other, max_new_tokens=1))
        self.prefill.finish(self._config.timeout_s)
        self._continue("other")

    def answer_p2p(self, prompt: list[int]) -> Answered:
        """The prefill engine reads the prompt, the decode engine answers."""
        self._say(f"prefill engine: reading {len(prompt)} tokens, sending their KV; decode engine: answering")
        expected = self._expect("prompt", prompt)
        self.prefill.begin(Prefill(transfer="prompt", tokens=prompt, to=self._address))
        answer = self._continue("prompt")
        return {**expected, **answer, **self.prefill.finish(self._config.timeout_s)}

    def answer_alone(self, prompt: list[int]) -> Answered:
        """The decode engine reads the prompt itself."""
        self._say("decode engine: reading the same prompt itself")
        return self._decode(Generate(tokens=prompt, max_new_tokens=self._config.new_tokens))

    def answer_control(self, prompt: list[int]) -> Answered:
        """The prompt, with the other prompt's KV, which is all there: so this transfer is nothing but a transfer."""
        self._say("decode engine: the same prompt with the other prompt's KV, as a control")
        self._expect("control", prompt)
        sent = self._send_again("control", "other", self.num_layers)
        return {**sent, **self._continue("control")}

    def answer_killed(self, prompt: list[int]) -> Answered:
        """The prefill engine dies when half of the layers have landed, and the others have been promised."""
        self._say("prefill engine: sending the prompt's KV again; SIGKILL when half of it has landed")
        self._expect("killed", prompt)
        self._send_again("killed", "prompt", self.num_layers // 2)
        self._decode(Await(transfer="killed", layer=self.num_layers // 2 - 1))
        killed_at = time.monotonic()
        self.prefill.kill()
        self._say("decode engine: reading the prompt itself, since its KV does not come")
        return {"killed_at": killed_at, **self._continue("killed")}

    def _expect(self, transfer: str, tokens: list[int]) -> dict[str, Any]:
        return self._decode(Expect(transfer=transfer, tokens=tokens, max_new_tokens=self._config.new_tokens))

    def _send_again(self, transfer: str, kept: str, num_layers: int) -> dict[str, Any]:
        command = SendAgain(transfer=transfer, kept=kept, to=self._address, num_layers=num_layers)
        return self.prefill.call(command, self._config.timeout_s)

    def _continue(self, transfer: str) -> dict[str, Any]:
        return self._decode(Continue(transfer=transfer, max_new_tokens=self._config.new_tokens))

    def _decode(self, command: Command) -> dict[str, Any]:
        return self.decode.call(command, self._config.timeout_s)


def _devices(device: str) -> list[str]:
    """Of the prefill and of the decode engine: two GPUs where there are two."""
    if device != "cuda":
        return [device, device]
    return ["cuda:0", f"cuda:{min(1, torch.cuda.device_count() - 1)}"]


def _ms(start_s: float, end_s: float) -> float:
    return (end_s - start_s) * 1e3
