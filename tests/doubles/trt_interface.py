"""TensorRT-LLM's connector interface in small: a stub package with the abstract classes, the step's data, and MPI.

`installed` puts it where `import tensorrt_llm` finds it, under the module path of either release, with the connector
imported anew on top of it.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

OLD, NEW = "1.2.0", "1.4.0rc1"
_CONNECTOR = "kvferry.connectors.trtllm.connector"
_WAIT_S = 30.0


@dataclass
class OldRequestData:
    """Of 1.1 and 1.2."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class RequestData(OldRequestData):
    """Of 1.4's pre-releases."""

    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    new_requests: list[Any] = field(default_factory=list)
    cached_requests: list[Any] = field(default_factory=list)


class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: Any) -> Any: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: Any) -> None: ...


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: Any) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> Any:
        return self._metadata

    def register_forward_pass_callable(self) -> Any:
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(self, finished_gen_req_ids: Any, started_loading_req_ids: Any) -> Any: ...


class Communicator:
    """MPI of one engine: every rank is a thread of its own, which does what its process's executor thread would."""

    def __init__(self, local: threading.local, size: int) -> None:
        self.size = size
        self._local = local
        self._barrier = threading.Barrier(size)
        self._sent: dict[int, bytes] = {}
        self._threads = [
            ThreadPoolExecutor(1, f"trt-rank-{rank}", initializer=self.enter, initargs=(rank,)) for rank in range(size)
        ]

    def enter(self, rank: int) -> None:
        """From here on the calling thread belongs to that rank."""
        self._local.communicator, self._local.rank = self, rank

    def on(self, rank: int, do: Callable[..., Any], *arguments: Any) -> Any:
        """What `do` gives, done by one rank."""
        return self._threads[rank].submit(do, *arguments).result(_WAIT_S)

    def on_all(self, do: Callable[[int], Any]) -> list[Any]:
        """What `do(rank)` gives on all ranks, which do it at one time. The first error is raised once all are done."""
        futures: list[Future[Any]] = [self._threads[rank].submit(do, rank) for rank in range(self.size)]
        errors = [future.exception(_WAIT_S) for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def broadcast(self, value: Any, root: int) -> Any:
        rank = self._local.rank
        if rank == root:
            self._sent[root] = pickle.dumps(value)
        self._barrier.wait(_WAIT_S)
        received = pickle.loads(self._sent[root])  # noqa: S301 - what MPI does
        self._barrier.wait(_WAIT_S)
        return received

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


class Stub:
    """The stub package of one release, as modules by name."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.local = threading.local()
        self.request_data = OldRequestData if version == OLD else RequestData
        names = ["tensorrt_llm", "tensorrt_llm._utils", "tensorrt_llm._torch", "tensorrt_llm._torch.pyexecutor"]
        names += ["tensorrt_llm._torch.pyexecutor.connectors"] if version == NEW else []
        self.modules = {name: ModuleType(name) for name in [*names, f"{names[-1]}.kv_cache_connector"]}
        for module in self.modules.values():
            module.__path__ = []
        vars(self.modules["tensorrt_llm"])["__version__"] = version
        vars(self.modules["tensorrt_llm._utils"]).update(
            mpi_rank=lambda: self.local.rank,
            mpi_world_size=lambda: self.local.communicator.size,
            mpi_broadcast=lambda value, root=0: self.local.communicator.broadcast(value, root),
        )
        vars(self.modules[f"{names[-1]}.kv_cache_connector"]).update(
            KvCacheConnectorScheduler=KvCacheConnectorScheduler, KvCacheConnectorWorker=KvCacheConnectorWorker
        )

    def communicator(self, size: int) -> Communicator:
        return Communicator(self.local, size)


@contextlib.contextmanager
def installed(version: str) -> Iterator[Stub]:
    """The stub of a release in place of TensorRT-LLM, and the connector on top of it."""
    stub = Stub(version)
    with mock.patch.dict(sys.modules, stub.modules):
        sys.modules.pop(_CONNECTOR, None)
        importlib.import_module(_CONNECTOR)
        yield stub
