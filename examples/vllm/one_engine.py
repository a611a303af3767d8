"""One vLLM engine that gets the KV of a long prompt back from the cache server, with its own prefix cache off.

    kvferry serve --socket /tmp/kvferry.sock --memory 4GiB &
    python examples/vllm/one_engine.py MODEL /tmp/kvferry.sock

MODEL is a folder or a name on the Hugging Face hub, of any model whose layers all have full attention.
"""

from __future__ import annotations

import sys
import time

from vllm import LLM, SamplingParams

DOCUMENT = "The ferry leaves at nine, and at ten, and at eleven, unless the wind is from the north. " * 60
QUESTIONS = ["When does it leave?", "When does it stay?"]


def connector(url: str) -> dict[str, object]:
    """What `vllm serve` takes as --kv-transfer-config."""
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # vLLM's default fails a request when its KV cannot be loaded
        "kv_connector_extra_config": {"url": url},
    }


def main(model: str, url: str) -> None:
    llm = LLM(model, enable_prefix_caching=False, max_model_len=4096, kv_transfer_config=connector(url))
    greedy = SamplingParams(temperature=0, max_tokens=16)
    for question in QUESTIONS:
        started = time.perf_counter()
        (output,) = llm.generate([f"{DOCUMENT}\n{question}"], greedy, use_tqdm=False)
        prompt_tokens = len(output.prompt_token_ids or [])
        seconds = time.perf_counter() - started
        print(f"{output.num_cached_tokens} of {prompt_tokens} prompt tokens reused, {seconds:.3f} s")
        print(f"  {output.outputs[0].text!r}")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(*sys.argv[1:])
