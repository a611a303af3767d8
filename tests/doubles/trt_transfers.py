"""What a `FakeTrtExecutor` and its connector agree on: promises, loads and saves that go on, and their ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from doubles.trt_blocks import RuleBroken
from doubles.trt_interface import Communicator, SchedulerOutput
from doubles.trt_requests import Request, State

if TYPE_CHECKING:
    from doubles.trt_executor import FakeTrtExecutor


class Transfers:
    """Asks for promises, and keeps the books of what is asynchronous."""

    def __init__(self, executor: FakeTrtExecutor) -> None:
        self._executor = executor
        self._setup = executor.setup
        self._loading: dict[int, Request] = {}
        self._saving: dict[int, Callable[[], None]] = {}
        self._untold: dict[str, list[int]] = {"load": [], "save": []}
        self._pending = [{"load": set[int](), "save": set[int]()} for _ in range(self._setup.num_ranks)]
        self._done = [{"load": set[int](), "save": set[int]()} for _ in range(self._setup.num_ranks)]

    def add(self, request: Request, budget: int) -> None:
        """Allocate for a request's first chunk: what is here, what the connector promises, and the rest."""
        executor, size = self._executor, self._setup.shape.tokens
        request.blocks, request.local = executor.blocks.match(request.tokens, request.scope)
        promised, is_async = self._ask(request)
        request.promised = promised
        if not self._setup.v2:
            end, request.matched = request.prompt_len, promised
        else:  # pages for one chunk only; what was promised beyond them is not used
            end = min(request.prompt_len, request.local + budget)
            request.matched = min(promised, end // size * size - request.local // size * size)
            if request.local + request.matched == request.prompt_len:
                request.matched -= size
        request.position = request.local + request.matched
        request.chunk = min(budget, request.prompt_len - request.position)
        if self._setup.v2:
            end = min(end, request.position + request.chunk)
        missing = -(-end // size) - len(request.blocks)
        request.blocks += executor.blocks.allocate(max(0, missing))
        self._make_holes(request)
        self._tell_blocks(request)
        request.state = State.CONTEXT
        if is_async:
            request.state = State.LOADING
            self._loading[request.request_id] = request
            self._untold["load"].append(request.request_id)

    def begin_saving(self, request: Request, free: Callable[[], None]) -> None:
        """The request has ended, and its blocks are kept until all ranks have said so."""
        self._saving[request.request_id] = free
        self._untold["save"].append(request.request_id)

    def forget_load(self, request: Request) -> None:
        """It was cancelled: nobody tells the workers."""
        self._loading.pop(request.request_id, None)
        with contextlib.suppress(ValueError):
            self._untold["load"].remove(request.request_id)

    def loading_blocks(self) -> frozenset[int]:
        """Blocks that asynchronous loads may write to at any time."""
        size = self._setup.shape.tokens
        return frozenset(
            block
            for request in self._loading.values()
            for block in request.blocks[request.local // size : request.position // size]
        )

    def loadable(self, output: SchedulerOutput, requests: Mapping[int, Request]) -> frozenset[int]:
        """Blocks that this step's loads may write to: what was promised; with V2 all new ones of the request."""
        size, found = self._setup.shape.tokens, set[int]()
        for data in output.new_requests:
            request = requests[data.request_id]
            if request.promised and not request.loaded:
                end = len(request.blocks) if self._setup.v2 else request.position // size
                found.update(request.blocks[request.local // size : end])
        return frozenset(found)

    def collect(self, ranks: Communicator) -> None:
        """Ask all ranks what has ended; what has on all of them, goes on, or is freed."""
        started, self._untold["load"] = self._untold["load"], []
        finished, self._untold["save"] = self._untold["save"], []
        for pending in self._pending:
            pending["load"].update(started)
            pending["save"].update(finished)
        ranks.on_all(lambda rank: self._collect(rank, finished, started))
        self._executor.watch.check("in get_finished", self.loading_blocks())
        for request_id in self._on_all_ranks("save"):
            self._saving.pop(request_id)()
        for request_id in self._on_all_ranks("load"):
            request = self._loading.pop(request_id, None)
            if request is not None:
                request.state, request.loaded = State.CONTEXT, True

    def _collect(self, rank: int, finished: list[int], started: list[int]) -> None:
        answer: Any = self._executor.workers[rank].get_finished(list(finished), list(started))
        for kind, ids in zip(("save", "load"), answer, strict=True):
            for request_id in ids:
                if request_id not in self._pending[rank][kind]:
                    raise RuleBroken(f"rank {rank} ended the {kind} of request {request_id}, which it was not told of")
                self._pending[rank][kind].remove(request_id)
                self._done[rank][kind].add(request_id)

    def _on_all_ranks(self, kind: str) -> list[int]:
        ended = set.intersection(*(done[kind] for done in self._done))
        for done in self._done:
            done[kind] -= ended
        return sorted(ended)

    def _ask(self, request: Request) -> tuple[int, bool]:
        size = self._setup.shape.tokens
        if request.asked:
            raise RuleBroken(f"request {request.request_id} is asked for twice")
        request.asked = True
        answer = self._executor.leader("get_num_new_matched_tokens", request, request.local)
        if not isinstance(answer, tuple) or [type(part) for part in answer] != [int, bool] or answer[0] < 0:
            raise RuleBroken(f"the answer to a query is {answer!r}")
        promised, is_async = answer
        if is_async and not promised:
            raise RuleBroken("an asynchronous load of nothing")
        if promised and (promised % size or request.local % size):
            raise RuleBroken(f"{promised} tokens after {request.local} are no whole blocks of {size}")
        if promised and request.local + promised >= request.prompt_len:
            raise RuleBroken(f"{request.local} + {promised} tokens leave none of {request.prompt_len} to compute")
        return promised, is_async

    def _make_holes(self, request: Request) -> None:
        """Blocks without a page, as where a window has passed them."""
        holes = min(self._setup.holes, request.position // self._setup.shape.tokens)
        self._executor.blocks.release(request.blocks[:holes])
        request.blocks[:holes] = [-1] * holes

    def _tell_blocks(self, request: Request) -> None:
        if self._setup.v2:
            self._executor.leader("update_state_after_alloc_by_layer_group", request, [list(request.blocks)])
        else:
            self._executor.leader("update_state_after_alloc", request, list(request.blocks))
