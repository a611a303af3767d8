"""The thread that makes a device's NCCL calls."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from kvferry.cuda.device import bound, device_uuid
from kvferry.cuda.stream import Event, Stream, beside_captures
from kvferry.errors import CudaError, NcclError
from kvferry.p2p.nccl.communicator import Communicator, State
from kvferry.p2p.nccl.functions import ncclConfig
from kvferry.p2p.nccl.lane import Lane
from kvferry.p2p.nccl.library import NCCLLibrary
from kvferry.p2p.nccl.preflight import check_devices, check_memory
from kvferry.p2p.nccl.settings import NcclSettings, check_environment, launches_ahead

_logger = logging.getLogger(__name__)

_IDLE_S = 1.0
# How NCCL and the GPU are asked whether they are done: without a pause at first, as a launch takes some 50 us, then
# ever less often, such that what took a while is noticed an eighth of that late.
_SPIN_S = 200e-6
_LATE, _LONGEST_S = 1 / 8, 500e-6
OnReached = Callable[[Exception | None], None]
_FIRST_BYTES = 256  # of the exchange that each side makes first, out and in


class NcclLauncher:
    """All communicators of one device, and the one thread that launches their transfers.

    That thread, a daemon because a driver that hangs must not keep the process from exiting, makes every NCCL call of
    every communicator, but for the abort that frees it. No call waits for a peer: communicators do not
    block, so one peer that is slow or dead holds up no other. A launch that NCCL is still carrying out is polled, and
    an event is recorded only after; earlier it would come before the transfer. Exchanges of one communicator run in the
    order in which they were given; those of several run at once, each in a stream of its own.

    A transfer that was launched keeps its multiprocessors until the peer launches it too. So both sides have to agree
    on it before either gives it to `Communicator.exchange`: then it never waits for anything but that launch.
    """

    def __init__(self, library: NCCLLibrary, device: int, settings: NcclSettings | None = None) -> None:
        check_environment()
        if library.is_rccl:
            _logger.warning("%r has the functions that are needed, and was never tried", library)
        self.library = library
        self.device = device
        self.settings = settings or NcclSettings()
        self._uuid = device_uuid(device)
        self._ahead = launches_ahead()
        self._changed = threading.Condition()  # for the fields below; held for moments only
        self._tasks: deque[Callable[[], object]] = deque()
        self._members: list[Communicator] = []
        self._stuck = 0
        self._stopping = False
        self._ended = False
        self._watched: list[tuple[Event, OnReached]] = []  # this and the next are the thread's own
        self._changed_at = 0.0  # when something last went on
        self._memory = self._make_memory()
        self._thread = threading.Thread(target=self._run, name=f"kvferry-nccl-{device}", daemon=True)
        self._thread.start()

    def connect(
        self, unique_id: bytes, rank: int, *, peer_device_uuid: str, name: str, timeout_s: float | None = None
    ) -> Future[Communicator]:
        """Join one peer: rank 0 or 1 of two. Both sides call it with the same id, of `ncclGetUniqueId` on one of them.

        The future ends when the first bytes have gone both ways, so that all memory is taken and later transfers find
        every connection made; or with NcclPeerError after `timeout_s` (by default the settings'). `name` is the peer in
        errors. For any thread.

        Raises:
            SameDeviceError: the peer is on this GPU.
            NcclError: there is no room for one more, in the settings or in GPU memory.
        """
        if rank not in (0, 1):
            raise ValueError(f"rank is 0 or 1, got {rank}")
        given = self.library.unique_id_from_bytes(unique_id)
        check_devices(self._uuid, peer_device_uuid)
        check_memory(self.device, self.settings.bytes_per_peer)
        with beside_captures(self.device):
            lane = Lane(self.library, self.device, rank)
        config = ncclConfig.non_blocking(self.settings.max_ctas)
        comm = Communicator(
            self.library,
            self._post,
            lane,
            begin=partial(self.library.ncclCommInitRankConfig, 2, given, rank, config),
            name=f"communicator with {name} (rank {rank} on device {self.device})",
            end_timeout_s=self.settings.end_timeout_s,
        )
        try:
            self._admit(comm)
        except NcclError:
            lane.close()
            raise
        return self._first_exchange(comm, timeout_s or self.settings.connect_timeout_s)

    def watch(self, event: Event, then: OnReached) -> None:
        """Call `then` once an event is reached, or with the error of asking. In this launcher's thread alone.

        Of one stream those given first are told first. What an event marks must not wait for anybody: the launcher does
        not end before it is reached.
        """
        self._watched.append((event, then))

    @property
    def has_ended(self) -> bool:
        """Whether its thread calls nothing any more."""
        with self._changed:
            return self._ended

    @property
    def num_communicators(self) -> int:
        """Those that have not ended."""
        with self._changed:
            return self._living()

    @property
    def num_stuck(self) -> int:
        """Those that could not be ended, and still hold what they have."""
        with self._changed:
            return self._stuck

    def close(self) -> None:
        """End all communicators, well where possible, and the thread. Idempotent; waits, but not without end."""
        with self._changed:
            self._stopping = True
            members = list(self._members)
            self._tasks.extend(member.close for member in members)
            self._changed.notify_all()
        longest = 3 * self.settings.end_timeout_s  # its two steps, and some time to notice
        self._thread.join(timeout=longest)
        if self._thread.is_alive():
            _logger.error("the NCCL thread of device %d did not end within %.0f s", self.device, longest)
            return
        with self._changed:
            memory, self._memory = self._memory, 0
        if memory and not self._stuck:
            with bound(self.device) as drv:
                drv.mem_free(memory)

    def __enter__(self) -> NcclLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<NcclLauncher on device {self.device}, {self.num_communicators} communicators, {self.num_stuck} stuck>"

    def _make_memory(self) -> int:
        with beside_captures(self.device), bound(self.device) as drv, Stream(self.device) as stream:
            memory = drv.mem_alloc(2 * _FIRST_BYTES)
            stream.memset_async(memory, 0, 2 * _FIRST_BYTES)
            stream.synchronize()
        return memory

    def _admit(self, comm: Communicator) -> None:
        with self._changed:
            if self._stopping:
                raise NcclError(f"the NCCL launcher of device {self.device} is closed")
            if self._living() + self._stuck >= self.settings.max_communicators:
                raise NcclError(
                    f"device {self.device} has {self.settings.max_communicators} communicators already, which is what "
                    "it may have: close one, or raise max_communicators"
                )
            self._members.append(comm)
            self._changed.notify_all()

    def _first_exchange(self, comm: Communicator, timeout_s: float) -> Future[Communicator]:
        """NCCL connects, and takes most of its memory, at the first transfer: make it part of connecting."""
        connected: Future[Communicator] = Future()
        connected.set_running_or_notify_cancel()

        def tell(first: Future[None]) -> None:
            error = first.exception()
            if error is not None:
                connected.set_exception(error)
            else:
                connected.set_result(comm)

        sends, receives = [(self._memory, _FIRST_BYTES)], [(self._memory + _FIRST_BYTES, _FIRST_BYTES)]
        comm.exchange(sends=sends, receives=receives, timeout_s=timeout_s).add_done_callback(tell)
        return connected

    def _living(self) -> int:
        """One that ended stays among the members for a moment more."""
        return sum(member.state is not State.ENDED for member in self._members)

    def _post(self, task: Callable[[], object]) -> bool:
        """Leave a task to the thread; False where it takes none any more, and every communicator has ended."""
        with self._changed:
            if self._ended:
                return False
            self._tasks.append(task)
            self._changed.notify_all()
        return True

    def _run(self) -> None:
        try:
            with beside_captures(self.device):
                self._loop()
        finally:  # members are left only where this ends as it should not
            with self._changed:
                self._stopping = self._ended = True
                lost, self._members = self._members, []
                tasks, self._tasks = self._tasks, deque()
                self._stuck += len(lost)
            for member in lost:
                member.lose()
            for task in tasks:
                _guarded(task)

    def _loop(self) -> None:
        while True:
            with self._changed:
                tasks, members = self._tasks, list(self._members)
                self._tasks = deque()
                went_on = bool(tasks)
                if self._stopping and not (tasks or members or self._watched):
                    self._ended = True
                    return
            while tasks:  # nothing is kept of those that are done: they have KV caches
                _guarded(tasks.popleft())
            went_on |= self._look()
            self._rest(self._turn(members) or went_on)

    def _look(self) -> bool:
        """Tell of the events that are reached; whether there were any."""
        watched, self._watched = self._watched, []
        left, reached = [], []
        # The last first: in the midst of asking, the GPU may reach an event that was not and another one behind it.
        for event, then in reversed(watched):
            try:
                error, done = None, event.query()
            except CudaError as problem:
                error, done = problem, True
            if done:
                reached.append(partial(then, error))
            else:
                left.append((event, then))
        self._watched = left[::-1]
        for call in reversed(reached):
            _guarded(call)
        return bool(reached)

    def _turn(self, members: list[Communicator]) -> bool:
        """One step of every communicator; whether anything changed."""
        busy = [member for member in members if member.busy]
        depth = self._ahead if len(busy) == 1 else 1
        now = time.monotonic()
        changed = [member.step(now, depth=depth) for member in busy]
        for member in busy:
            if member.state is State.ENDED:
                self._forget(member)
        return any(changed)

    def _forget(self, member: Communicator) -> None:
        stuck = member.ended.exception() is not None
        if stuck:
            _logger.error(
                "%s: %s. What it holds is not given back before the process ends", member, member.ended.exception()
            )
        with self._changed:
            self._members.remove(member)
            self._stuck += stuck

    def _rest(self, changed: bool) -> None:
        """Wait for a task; not for long while there is something to poll."""
        now = time.monotonic()
        if changed:
            self._changed_at = now
        quiet_s = now - self._changed_at
        with self._changed:
            polling = bool(self._watched) or any(member.busy for member in self._members)
            if not self._tasks and (not polling or quiet_s > _SPIN_S):
                self._changed.wait(min(_LATE * quiet_s, _LONGEST_S) if polling else _IDLE_S)


def _guarded(call: Callable[[], object]) -> None:
    """A mistake in one call must not end the thread that all transfers depend on."""
    try:
        call()
    except Exception:  # whatever it is
        _logger.exception("a call of the NCCL thread failed")
