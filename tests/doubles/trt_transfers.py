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

    def waits(self, request: Request) -> bool:
        """Whether a request, which is asked for now at the latest, does not begin in this step."""
        if self._setup.waits and not request.asked:
            matched, request.local = self._executor.blocks.match(request.tokens, request.scope)
            self._executor.blocks.release(matched, request.tokens[: request.local], request.scope)
            request.promised, _ = self._ask(request)
            request.wait = self._setup.waits
        request.wait -= 1
        return request.wait >= 0

    def add(self, request: Request, budget: int) -> None:
        """Allocate for a request's first chunk: what is here, what the connector promises, and the rest."""
        executor, size = self._executor, self._setup.shape.tokens
        blocks, local = executor.blocks.match(request.tokens, request.scope)
        is_async = False
        if request.asked:
            self._overtake(request, local)
        else:
            request.local = local
            request.promised, is_async = self._ask(request)
        request.blocks, request.local = blocks, local
        end, request.matched = request.prompt_len, request.promised
        if self._setup.v2 and not self._setup.grows:  # pages for one chunk only; what goes beyond them is not used
            end = min(end, local + budget)
            request.matched = max(0, min(request.promised, end // size * size - local))
        request.position = local + request.matched
        request.chunk = min(budget, request.prompt_len - request.position)
        if self._setup.grows:
            end = request.position + request.chunk
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
        """It was cancelled: nobody tells the workers. What was promised, and never came to a load, is given back."""
        if request.asked and request.state is State.WAITING:
            self._cancel_load(request, request.local, request.local + request.promised)
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
        request.asked_at, request.offered = request.local, promised
        if is_async and not promised:
            raise RuleBroken("an asynchronous load of nothing")
        if promised and (promised % size or request.local % size):
            raise RuleBroken(f"{promised} tokens after {request.local} are no whole blocks of {size}")
        if promised and request.local + promised >= request.prompt_len:
            raise RuleBroken(f"{request.local} + {promised} tokens leave none of {request.prompt_len} to compute")
        return promised, is_async

    def _overtake(self, request: Request, local: int) -> None:
        """What is here has grown, or shrunk, since the query: the end of what was promised stays where it is."""
        end = request.local + request.promised
        if request.promised and local > request.local:
            self._cancel_load(request, request.local, min(local, end))
        request.promised = max(0, end - local) if request.promised else 0

    def _cancel_load(self, request: Request, start: int, end: int) -> None:
        if end > start and hasattr(self._executor.scheduler, "cancel_load"):
            self._executor.leader("cancel_load", request, start, end)

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
