"""A process that has imported SGLang, and forks engines and cache servers: `python -m sglang_engine.engine_zygote FD`.

See vllm_engine.engine_zygote, whose requests and answers these are.
"""

from __future__ import annotations

from vllm_engine.engine_zygote import fork_on_demand


def main() -> None:
    import sglang.srt.managers.scheduler  # noqa: F401 - so that no engine has to

    from kvferry.cli.main import main as kvferry
    from sglang_engine.engine_side import EngineSide
    from sglang_engine.on_cpu import prepare

    prepare()
    fork_on_demand(EngineSide, kvferry)


if __name__ == "__main__":
    main()
