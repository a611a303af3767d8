"""A second vLLM engine that goes on with the KV of a first one, which was killed.

    kvferry serve --socket /tmp/kvferry.sock --memory 4GiB &
    python examples/vllm/two_engines.py MODEL /tmp/kvferry.sock

Each engine is a process (and has processes of its own); `kill -9` leaves it no time to say goodbye.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from one_engine import DOCUMENT, QUESTIONS, connector


def engine(model: str, url: str) -> None:
    """Answer the first question, then wait to be killed."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, max_model_len=4096, kv_transfer_config=connector(url))
    started = time.perf_counter()
    greedy = SamplingParams(temperature=0, max_tokens=16)
    (output,) = llm.generate([f"{DOCUMENT}\n{QUESTIONS[0]}"], greedy, use_tqdm=False)
    seconds = time.perf_counter() - started
    print(f"{output.num_cached_tokens} prompt tokens reused, {seconds:.3f} s: {output.outputs[0].text!r}", flush=True)
    time.sleep(3600)


def main(model: str, url: str) -> None:
    for name in ("first", "second"):
        command = [sys.executable, __file__, "--engine", model, url]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert child.stdout is not None
        answer = next((line for line in child.stdout if "prompt tokens reused" in line), "no answer\n")
        print(f"{name} engine: {answer}", end="")
        time.sleep(1)  # the last store ends after the answer
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


if __name__ == "__main__":
    if sys.argv[1] == "--engine":
        engine(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
