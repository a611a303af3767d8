"""The VMM and torch wrappers with every width of element, at interior offsets, exported and opened by fresh threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from doubles.child import Child
from doubles.importing import check_nothing_mapped, received
from doubles.side import digest

pytestmark = pytest.mark.gpu

MIB = 1 << 20
DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


@pytest.fixture(autouse=True)
def nothing_stays_mapped() -> Iterator[None]:
    yield
    check_nothing_mapped()


@pytest.fixture(scope="module", params=["vmm", "torch"])
def exporter(request: pytest.FixtureRequest) -> Iterator[Child]:
    """A process with 64 MiB of torch's memory, named by the wrapper that suits it."""
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if request.param == "vmm" else {}
    with Child(fake=False, env=env) as child:
        child.call("alloc", name=request.param, nbytes=64 * MIB, kind="torch")
        child.memory_name = request.param  # type: ignore[attr-defined]
        yield child


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_by_fresh_threads(exporter: Child, dtype: str) -> None:
    kind = exporter.memory_name  # type: ignore[attr-defined]
    shape = [30, MIB // 2]  # of two bytes each: from inside one 20 MiB chunk into the next ones
    exported = exporter.call(
        "wrap", name="w", memory=kind, start=MIB + 512, dtype=dtype, shape=shape, seed=3, wrapper=kind, thread=True
    )
    seen: list[tuple[str, str]] = []

    def use() -> None:
        with received(exporter, "w", exported) as wrapper:
            tensor = wrapper.to_tensor()
            seen.append((str(tensor.dtype), digest(tensor)))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(40)
    assert seen == [(f"torch.{dtype}", exported["digest"])]
