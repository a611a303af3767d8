"""`FakeTrtExecutor`: TensorRT-LLM's executor loop around a connector, with its rules enforced by raising.

It owns blocks whose bytes tell which tokens they are of, on every rank. What a forward reads is compared with what the
tokens before should have left there, and what nobody may write to with what it was. It shows no stream order, no IPC of
a GPU's pool, and no MPI between processes.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from doubles.trt_blocks import BlockManager, Memory, RuleBroken, Watch, WrongKV
from doubles.trt_forward import Forward
from doubles.trt_interface import Communicator, SchedulerOutput, Stub
from doubles.trt_memory import layout_over, new_pool
from doubles.trt_requests import Request, Setup, State
from doubles.trt_transfers import Transfers

MakePool = Callable[[Setup], torch.Tensor]


class EngineDead(Exception):
    """The executor's loop has ended by what the connector raised outside a forward."""


class FakeTrtExecutor:
    """One engine. `step` is one iteration of its loop; the thread that calls it stands for the loops of all ranks.

    Each rank's connector is only ever called by that rank's own thread.
    """

    def __init__(
        self, stub: Stub, scheduler: Any, worker: Any, args: Any, setup: Setup, *, make_pool: MakePool = new_pool
    ) -> None:
        self.setup = setup
        self.dead = False
        self.requests: dict[int, Request] = {}
        self._stub = stub
        self._ranks: Communicator = stub.communicator(setup.num_ranks)
        self._queue: list[Request] = []
        self._running: list[Request] = []
        self._previous: list[Request] = []
        self.scheduler: Any = None
        self.workers: list[Any] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._build(scheduler, worker, args, make_pool)
            undo.pop_all()
        self.transfers = Transfers(self)
        self.watch = Watch(self.memories, self.blocks)

    def _build(self, scheduler: Any, worker: Any, args: Any, make_pool: MakePool) -> None:
        """Twice, as where memory is estimated first: the connector sees one pool only."""
        made = [self._construct(rank, scheduler, worker, args) for rank in range(self.setup.num_ranks)]
        self.scheduler, self.workers = made[0][0], [pair[1] for pair in made]
        callables = self._ranks.on_all(lambda rank: self.workers[rank].register_forward_pass_callable())
        self._computing = Forward(self.setup, self.workers, callables)
        for _ in range(2):
            pools = [make_pool(self.setup) for _ in range(self.setup.num_ranks)]
        self.memories = [Memory(pool, self.setup.shape, rank) for rank, pool in enumerate(pools)]
        self.blocks = BlockManager(self.memories, self.setup.shape, keeps=self.setup.keeps, partial=self.setup.partial)
        if self.setup.v2:
            self._ranks.on_all(
                lambda rank: self.workers[rank].register_kv_cache_layout(layout_over(pools[rank], self.setup))
            )
        else:
            self._ranks.on_all(lambda rank: self.workers[rank].register_kv_caches(pools[rank]))
        with contextlib.suppress(AttributeError):
            self.leader("wait_for_initialization")

    def _construct(self, rank: int, scheduler: Any, worker: Any, args: Any) -> tuple[Any, Any]:
        """Both sides of a rank, at one time, each by a thread of its own."""
        together = threading.Barrier(2 if rank == 0 else 1)

        def make(cls: Any) -> Any:
            together.wait(20)
            return cls(args)

        with ThreadPoolExecutor(2, initializer=self._ranks.enter, initargs=(rank,)) as threads:
            futures = [threads.submit(make, cls) for cls in ([scheduler, worker] if rank == 0 else [worker])]
            made = [future.result(30) for future in futures]
        return (made[0] if rank == 0 else None), made[-1]

    # What tests ask for.

    def submit(self, prompt: list[int], **fields: Any) -> Request:
        request = Request(len(self.requests) + 1, list(prompt), **fields)
        self.requests[request.request_id] = request
        self._queue.append(request)
        return request

    def run(self, *prompts: list[int], **fields: Any) -> list[Request]:
        """All of them, to their ends."""
        found = [self.submit(prompt, **fields) for prompt in prompts]
        self.finish(*found)
        return found

    def finish(self, *requests: Request, timeout_s: float = 40.0) -> None:
        until = time.monotonic() + timeout_s
        while not all(request.state in (State.ENDED, State.FAILED) for request in requests):
            if time.monotonic() > until:
                raise RuleBroken(f"no end after {timeout_s} s: {[request.state for request in requests]}")
            self.step()

    def cancel(self, request: Request, *, silently: bool = False) -> None:
        """The client is gone. The blocks are free at once, also those of a load that is going on.

        `silently`, as some releases do it, the connector is not told.
        """
        if request in self._queue:
            self._queue.remove(request)
        for batch in (self._running, self._previous):
            if request in batch:
                batch.remove(request)
        self.transfers.forget_load(request)
        if silently or not request.blocks:
            self._free(request, State.ENDED, keep=False, at_once=False)
        else:
            self._end(request, State.ENDED, keep=False)
        self.watch.note()

    def pause(self, request: Request) -> None:
        """V2 takes a request's blocks away; it will be computed again."""
        self._running.remove(request)
        self.blocks.release(request.blocks, at_once=False)
        request.begin_anew()
        self._queue.insert(0, request)
        self.watch.note()
        with contextlib.suppress(AttributeError):
            self.leader("request_reset", request)

    def close(self) -> None:
        for side in [self.scheduler, *self.workers]:
            with contextlib.suppress(AttributeError):
                side.shutdown()
        self._ranks.close()

    def leader(self, method: str, *arguments: Any) -> Any:
        """What the scheduler's side gives, on rank 0's thread; sent to all ranks, so it has to be picklable."""
        answer = self._ranks.on(0, lambda: getattr(self.scheduler, method)(*arguments))
        return pickle.loads(pickle.dumps(answer))  # noqa: S301 - what MPI does

    def step(self) -> None:
        """One iteration."""
        if self.dead:
            raise EngineDead("the loop has ended")
        self.watch.check("between steps", self.transfers.loading_blocks())
        with self._fatal():
            batch = self._schedule()
            if batch:
                output = self._output(batch)
                batch = [request for request in batch if request.state is not State.LOADING]
                self._prepare(output)
        if batch:
            self._forward(batch)
        due, self._previous = (self._previous, batch) if self.setup.overlap else (batch, [])
        self.watch.note()
        with self._fatal():
            for request in due:
                self._process(request)
            self.watch.note()
            self.transfers.collect(self._ranks)
        self.watch.note()

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        """What the connector raises here ends the loop."""
        try:
            yield
        except (RuleBroken, WrongKV):
            raise
        except Exception as error:
            self.dead = True
            raise EngineDead(f"{type(error).__name__}: {error}") from error

    def _schedule(self) -> list[Request]:
        budget, batch = self.setup.max_tokens, list[Request]()
        for request in [*self._running]:
            if request.state is State.GENERATION:
                request.chunk = 1
            else:
                request.chunk = min(budget, request.prompt_len - request.position)
            if request.chunk > 0 and request.state in (State.GENERATION, State.CONTEXT):
                budget -= request.chunk
                batch.append(request)
        while self._queue and budget > 0 and self._fits(self._queue[0]):
            request = self._queue.pop(0)
            self._running.append(request)
            self.transfers.add(request, budget)
            budget -= request.chunk
            batch.append(request)
        for request in batch:
            if request.state is not State.LOADING:
                self._grow(request)
        return batch

    def _fits(self, request: Request) -> bool:
        """GUARANTEED_NO_EVICT: as if nothing could be reused. Then, where that is so, the request is asked for."""
        size = self.setup.shape.tokens
        wanted = -(-(request.prompt_len + request.max_new + 1) // size)
        held = sum(-(-(r.prompt_len + r.max_new + 1) // size) - len(r.blocks) for r in self._running)
        return wanted + max(0, held) <= self.blocks.num_available() and not self.transfers.waits(request)

    def _grow(self, request: Request) -> None:
        """Blocks for this step's tokens; with overlap the host runs one token ahead."""
        if request.state is State.GENERATION:
            end = len(request.sequence) + self.setup.overlap
        else:
            end = request.position + request.chunk
        while len(request.blocks) * self.setup.shape.tokens < end:
            request.blocks += self.blocks.allocate(1)

    def _output(self, batch: list[Request]) -> SchedulerOutput:
        output = SchedulerOutput()
        for request in batch:
            if request.state is State.LOADING:
                continue
            new_ids, request.told_blocks = request.blocks[request.told_blocks :], len(request.blocks)
            new_tokens, request.told_tokens = request.tokens[request.told_tokens :], len(request.tokens)
            if request.state is State.CONTEXT:
                position = request.position - (request.matched if request.is_new and not request.loaded else 0)
            else:
                position = len(request.tokens) - 1
            data = self._stub.request_data(request.request_id, new_tokens, new_ids, position, request.chunk)
            if self.setup.v2:
                data.new_block_ids_by_layer_group = [new_ids]  # type: ignore[attr-defined]
            (output.new_requests if request.is_new else output.cached_requests).append(data)
        return output

    def _prepare(self, output: SchedulerOutput) -> None:
        """The step's metadata to all ranks, and their loads; nobody takes metadata back."""
        self.watch.note()  # what was evicted is poisoned by now
        plan = pickle.dumps(self.leader("build_connector_meta", output))
        self._ranks.on_all(lambda rank: self.workers[rank].bind_connector_meta(pickle.loads(plan)))  # noqa: S301
        for _ in range(1 + self.setup.repeats_hooks):
            self._ranks.on_all(
                lambda rank: self.workers[rank].start_load_kv(self._computing.stream(self.memories[rank]))
            )
        self.watch.check("by loads", self.transfers.loadable(output, self.requests) | self.transfers.loading_blocks())
        for data in output.new_requests:
            self.requests[data.request_id].is_new = False
        self.blocks.poison_freed()

    def _forward(self, batch: list[Request]) -> None:
        """Compute; what the connector raises here fails all requests that are active, and the loop goes on."""
        hooks = not (self.setup.graphs and all(request.state is State.GENERATION for request in batch))
        try:
            self._ranks.on_all(lambda rank: self._computing.compute(rank, self.memories[rank], batch, hooks=hooks))
        except (RuleBroken, WrongKV):
            raise
        except Exception:  # noqa: BLE001 - whatever a connector raises
            for request in list(self._running):
                self._end(request, State.FAILED, keep=False)
            batch.clear()
            return
        for request in batch:
            if request.state is State.CONTEXT:
                request.position += request.chunk
            if request.state is State.GENERATION or request.position == request.prompt_len:
                request.sampled.append(int(request.hashes[-1]) % 50_000)

    def _process(self, request: Request) -> None:
        """The host learns of what was sampled; requests that have all their tokens end."""
        if request.state not in (State.CONTEXT, State.GENERATION) or request.position < request.prompt_len:
            return
        if len(request.tokens) < len(request.sequence):
            request.tokens.append(request.sequence[len(request.tokens)])
        request.state = State.GENERATION
        if len(request.tokens) - request.prompt_len >= request.max_new:
            self._end(request, State.ENDED)

    def _end(self, request: Request, state: State, *, keep: bool = True) -> None:
        if request in self._running:
            self._running.remove(request)
        method = "request_finished_by_layer_group" if self.setup.v2 else "request_finished"
        saving = self.leader(method, request, [list(request.blocks)] if self.setup.v2 else list(request.blocks))
        if not isinstance(saving, bool):
            raise RuleBroken(f"{method} gave {saving!r}")
        if saving:
            request.state = State.SAVING
            self.transfers.begin_saving(request, lambda: self._free(request, state, keep=keep))
        else:
            self._free(request, state, keep=keep)

    def _free(self, request: Request, state: State, *, keep: bool, at_once: bool = True) -> None:
        computed = request.sequence[: max(request.position, len(request.tokens) - 1)] if keep else []
        self.blocks.release(request.blocks, computed, request.scope, at_once=at_once)
        request.blocks, request.state = [], state
        if request in self._running:
            self._running.remove(request)
