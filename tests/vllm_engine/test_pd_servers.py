"""`kvferry route` between real vLLM servers: answers are those of one engine, whatever is killed no request hangs."""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm_engine import models
from vllm_engine.api_servers import ApiServer, ApiZygote, Deployment, complete, get
from vllm_engine.models import prompt
from vllm_engine.processes import eventually
from vllm_engine.results import Results
from vllm_engine.stage import IS_026, Reference

pytestmark = pytest.mark.skipif(IS_026, reason="its server has another entry point")

AT_ONCE = 8
LOAD, WARM = 48, 2


@pytest.fixture(scope="module")
def api_zygote() -> Iterator[ApiZygote]:
    made = ApiZygote()
    yield made
    made.close()


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `reference`, with a tokenizer, which servers want, and a form of conversations."""
    folder = models.with_tokenizer(models.llama(tmp_path_factory.mktemp("talking")))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    return folder


@pytest.fixture
def deploy(api_zygote: ApiZygote, talking: Path, tmp_path: Path) -> Iterator[Any]:
    made: list[Deployment] = []

    def deploy(prefills: int, decodes: int) -> Deployment:
        made.append(Deployment(api_zygote, tmp_path, talking, prefills, decodes))
        made[-1].await_engines()
        return made[-1]

    yield deploy
    for one in made:
        one.close()


def mixed(count: int) -> list[list[int]]:
    """Prompts of 1 to 1,500 tokens, some of which begin alike."""
    source = random.Random(5)
    lengths = [1, 2, 31, 32, 33, 64, 1500, *(source.randrange(1, 1500) for _ in range(count))][:count]
    return [prompt(900 + number % 40, length) for number, length in enumerate(lengths)]


def ask_all(deployment: Deployment, prompts: list[list[int]]) -> list[list[int]]:
    """8 at a time, every other one streamed."""
    url, model = deployment.router.url, deployment.model

    def ask(number: int) -> list[int]:
        return complete(url, model, prompts[number], stream=number % 2 == 1)[0]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, range(len(prompts))))


def received(deployment: Deployment) -> float:
    return sum(one.metrics().get("vllm:kvferry_p2p_receives_total", 0.0) for one in deployment.decodes)


def all_blocks_are_free(*servers: ApiServer) -> None:
    for server in servers:
        eventually(lambda server=server: server.kv_in_use() == 0, 60)  # type: ignore[misc]


def check_all(deployment: Deployment, reference: Reference, count: int) -> None:
    """All answers are right, all KV came over, no engine computed for another, no block is left."""
    prompts = mixed(count)
    assert ask_all(deployment, prompts) == reference(prompts)
    handed_over = sum(len(one) > 1 for one in prompts)
    eventually(lambda: received(deployment) == handed_over, 30)
    all_blocks_are_free(*deployment.prefills, *deployment.decodes)
    measures = get(deployment.router.url, "/metrics")
    assert f'kvferry_router_requests_total{{outcome="answered"}} {count}.0' in measures
    assert 'kvferry_router_retries_total{failed="prefill"} 0.0' in measures
    assert 'kvferry_router_retries_total{failed="decode"} 0.0' in measures


def test_one_and_one(deploy: Any, reference: Reference) -> None:
    check_all(deploy(1, 1), reference, 24)


@pytest.mark.full
@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (1, 2), (2, 1)])
def test_a_hundred_requests(deploy: Any, reference: Reference, prefills: int, decodes: int) -> None:
    deployment = deploy(prefills, decodes)
    check_all(deployment, reference, 100)
    for server in (*deployment.prefills, *deployment.decodes):
        assert server.metrics()["vllm:request_success_total"] > 0


@pytest.mark.full
def test_a_chat(deploy: Any) -> None:
    """Of a conversation, too, the decode engine alone gives the same as both together."""
    deployment = deploy(1, 1)
    body: dict[str, Any] = {"model": str(deployment.model), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {
        "messages": [{"role": "user", "content": "the ferry leaves at nine and ten unless wind is from north " * 9}]
    }
    body["return_token_ids"] = True
    found = [post(url, "/v1/chat/completions", body) for url in (deployment.router.url, deployment.decodes[0].url)]
    tokens = [one["choices"][0]["token_ids"] for one in found]
    assert tokens[0] == tokens[1]
    assert received(deployment) == 1


@pytest.mark.full
def test_whatever_is_killed(deploy: Any, reference: Reference) -> None:
    """Prefill engine, decode engine, router, each with requests under way; each comes back, and all goes on."""
    deployment = deploy(1, 1)
    kill_prefill(deployment, reference)
    kill_decode(deployment, reference)
    kill_router(deployment, reference)


def kill_prefill(deployment: Deployment, reference: Reference) -> None:
    """Every answer is right all the same."""
    (victim,) = deployment.prefills
    asked = long_prompts(1)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        going_on = begin(pool, deployment, asked)
        eventually(lambda: victim.metrics()["vllm:num_requests_running"] > 0, 60)
        victim.kill()
        assert [one.result(150) for one in going_on] == reference(asked)
    all_blocks_are_free(*deployment.decodes)
    assert ask_all(deployment, asked) == reference(asked)  # by the decode engine alone
    deployment.prefills = [deployment.begin("kv_producer", victim.port)]
    again(deployment, reference)


def kill_decode(deployment: Deployment, reference: Reference) -> None:
    """Each request under way is answered or told, at once; the prefill engine's blocks come back."""
    (victim,) = deployment.decodes
    asked = long_prompts(2)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        going_on = begin(pool, deployment, asked, max_tokens=400)
        eventually(lambda: victim.metrics()["vllm:num_requests_running"] > 0, 60)
        victim.kill()
        began = time.monotonic()
        told = [one.exception(60) for one in going_on]
        assert time.monotonic() - began < 60
    assert all(isinstance(one, (urllib.error.HTTPError, AssertionError)) for one in told if one is not None), told
    assert any(told)
    all_blocks_are_free(*deployment.prefills)
    deployment.decodes = [deployment.begin("kv_consumer", victim.port)]
    again(deployment, reference)


def kill_router(deployment: Deployment, reference: Reference) -> None:
    """Both engines give up what nobody waits for; the next router knows them again."""
    asked = long_prompts(3)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        going_on = begin(pool, deployment, asked, max_tokens=400)
        eventually(lambda: deployment.decodes[0].metrics()["vllm:num_requests_running"] > 0, 60)
        deployment.router.kill()
        told = [one.exception(60) for one in going_on]
    assert any(told)
    assert all(error or len(one.result()) == 400 for error, one in zip(told, going_on, strict=True))
    all_blocks_are_free(*deployment.prefills, *deployment.decodes)
    deployment.route()
    again(deployment, reference)


def again(deployment: Deployment, reference: Reference) -> None:
    """All are there, and hand KV over."""
    deployment.await_engines()
    before, asked = received(deployment), long_prompts(4)
    assert ask_all(deployment, asked) == reference(asked)
    eventually(lambda: received(deployment) == before + len(asked), 30)
    all_blocks_are_free(*deployment.prefills, *deployment.decodes)


def long_prompts(seed: int) -> list[list[int]]:
    return [prompt(1000 + 10 * seed + number, 1400 + number) for number in range(6)]


def begin(
    pool: ThreadPoolExecutor, deployment: Deployment, prompts: list[list[int]], max_tokens: int = 16
) -> list[Future[list[int]]]:
    url, model = deployment.router.url, deployment.model

    def ask(number: int) -> list[int]:
        return complete(url, model, prompts[number], stream=number % 2 == 1, max_tokens=max_tokens)[0]

    return [pool.submit(ask, number) for number in range(len(prompts))]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_load(deploy: Any, results: Results) -> None:
    """Requests a second and time to first token, beside one engine that does both. On few cores they share them all."""
    deployment = deploy(1, 1)
    single = deployment.single().ready()
    for name, length, tokens in (("short", 100, 32), ("long", 1400, 32)):
        prompts = [prompt(2000 + number, length) for number in range(LOAD)]
        alone = load(single.url, deployment.model, prompts, tokens)
        routed = load(deployment.router.url, deployment.model, prompts, tokens)
        results.add(f"pd_{name}_requests", routed[0], "requests/s", limit=alone[0])
        results.add(f"pd_{name}_first_token", routed[1], "ms", limit=alone[1])
    eventually(lambda: received(deployment) == 2 * (LOAD + WARM), 30)


def load(url: str, model: Path, prompts: list[list[int]], max_tokens: int) -> tuple[float, float]:
    """Requests a second, 8 at a time, and the median of their first tokens in ms."""

    def ask(one: list[int]) -> float:
        return complete(url, model, one, stream=True, max_tokens=max_tokens)[1]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ask, prompts[:WARM]))
        began = time.monotonic()
        firsts = list(pool.map(ask, prompts))
    return len(prompts) / (time.monotonic() - began), statistics.median(firsts) * 1e3


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}{path}", data, kind), timeout=100) as reply:
        return json.loads(reply.read())


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_example(talking: Path) -> None:
    """`examples/pd/run.py` starts all three, asks, and leaves nobody behind."""
    script = Path(__file__).parents[2] / "examples" / "pd" / "run.py"
    words = [str(talking), "--port", "0", "--ask", "the ferry leaves at nine and ten", "--"]
    words += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--block-size", "32"]
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(re.findall(r"logs: (\S+)", done.stdout)[0])
    assert "answer: '" in done.stdout
    assert "tried again" not in (folder / "router.log").read_text()
    words_of = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in words_of if str(talking).encode() in line and b"--kv-transfer-config" in line]
