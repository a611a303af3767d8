"""The NCCL carrier: from GPU to GPU, over NVLink or the network, by communicators of two ranks."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

from kvferry.cuda.device import bound, ordinal_of
from kvferry.cuda.stream import beside_captures
from kvferry.errors import KVFerryError, ProtocolError, TransferError
from kvferry.p2p.carriers.base import CarrierEvents
from kvferry.p2p.carriers.pushes.buffers import Buffer
from kvferry.p2p.carriers.pushes.carrier import PushCarrier, Tell
from kvferry.p2p.carriers.pushes.inlet import Inlet
from kvferry.p2p.carriers.pushes.outlet import Outlet, Post
from kvferry.p2p.carriers.pushes.polled import PolledCopies
from kvferry.p2p.nccl import Communicator, NcclLauncher, NCCLLibrary, NcclSettings
from kvferry.p2p.signal.handshake import NCCL_CARRIER
from kvferry.p2p.signal.messages import Go, NcclNew, Push
from kvferry.p2p.signal.session import Session

SLOTS = 3
# What a part costs the host, some 0.4 ms, has to be less than it takes on the wire: 0.5 ms for 128 MiB over NVLink.
# GPUs of less memory have slower links.
_MEMORY_A_SLOT = 1024
_MAX_SLOT_BYTES, _MIN_SLOT_BYTES = 128 << 20, 1 << 20
_SMALL = 8  # a slot of the second buffer is so many times smaller: it is for what must not wait for a peer that hangs


class NcclCarrier(PushCarrier):
    """All but `prepare` and `close` is called in the loop's thread.

    Each direction of a session has a communicator of its own, made by its sender when it first has something to send.
    What runs, after both sides have a buffer for it and have agreed, is done in the launcher's thread alone: copies and
    launches follow each other there without waiting for another thread. So nothing that is launched waits for anything
    but its other half, which is launched, too.
    """

    name = NCCL_CARRIER
    error_code = "nccl"

    def __init__(self, events: CarrierEvents, tell: Tell, post: Post, settings: NcclSettings) -> None:
        super().__init__(events, tell, post)
        self._settings = settings
        self._library: NCCLLibrary | None = None
        self._launcher: NcclLauncher | None = None
        self._memory = ExitStack()
        self._device = -1
        self._joined: set[Session] = set()  # those whose peer has made its communicator

    @property
    def bytes_per_peer(self) -> int:
        """GPU memory that each direction of a session takes."""
        return self._settings.bytes_per_peer

    def prepare(self, device_uuid: str) -> None:
        """Load NCCL and allocate the buffers, once. Raises NcclError, CudaError where that cannot be."""
        device = ordinal_of(device_uuid)
        if self._launcher is not None:
            if self._device != device:
                raise ProtocolError(f"NCCL was made ready for another GPU than {device_uuid}: use another engine")
            return
        self._library = NCCLLibrary()
        launcher = NcclLauncher(self._library, device, self._settings)
        try:
            with beside_captures(device), ExitStack() as undo:
                large = slot_bytes(device)
                self._use([_buffer(launcher, nbytes, undo) for nbytes in (large, large // _SMALL) * 2])
                self._memory = undo.pop_all()
        except BaseException:
            launcher.close()
            raise
        self._launcher, self._device = launcher, device

    def heard(self, session: Session, message: NcclNew | Push | Go) -> bool:
        """A message of this carrier's own; False where it was not to be expected, which ends the session."""
        if not isinstance(message, NcclNew):
            return super().heard(session, message)
        try:
            self._join(session, message)
        except KVFerryError as error:
            self._fail(session, error)
            return False
        return True

    def session_lost(self, session: Session) -> None:
        """Exchange nothing more over it; what is being read or written is waited for."""
        self._joined.discard(session)
        super().session_lost(session)

    def close(self) -> None:
        """End the communicators, and free the buffers. Idempotent; waits, but not without end."""
        launcher, self._launcher = self._launcher, None
        if launcher is None:
            return
        launcher.close()
        if launcher.has_ended and not launcher.num_stuck:
            with beside_captures(self._device):
                self._memory.close()

    def _is_ready(self, session: Session) -> bool:
        if self._launcher is None:
            self._fail(session, TransferError("failed", "NCCL was not made ready"))
        return self._launcher is not None

    def _connect_outlet(self, session: Session, outlet: Outlet) -> None:
        assert self._library is not None
        unique_id = bytes(self._library.ncclGetUniqueId())
        self._tell(session, NcclNew(unique_id=unique_id, max_ctas=self._settings.max_ctas))
        self._connect(session, outlet, unique_id, 0)

    def _connect_inlet(self, session: Session, inlet: Inlet) -> None:
        """Nothing yet: the sender says when."""

    def _join(self, session: Session, message: NcclNew) -> None:
        inlet = self._inlet(session)
        if message.max_ctas != self._settings.max_ctas:
            raise ProtocolError(f"{message.max_ctas} NCCL channels there, {self._settings.max_ctas} here: set the same")
        if inlet is None or session in self._joined:
            raise ProtocolError("a second communicator for one direction")
        self._joined.add(session)
        self._connect(session, inlet, message.unique_id, 1)

    def _connect(self, session: Session, end: Outlet | Inlet, unique_id: bytes, rank: int) -> None:
        assert self._launcher is not None
        assert session.about is not None
        uuid = session.about.device_uuid
        future = self._launcher.connect(unique_id, rank, peer_device_uuid=uuid, name=repr(session))
        future.add_done_callback(lambda done: self._post(partial(self._connected, session, end, done)))

    def _connected(self, session: Session, end: Outlet | Inlet, done: Future[Communicator]) -> None:
        error = done.exception()
        if error is not None:
            self._fail(session, error if isinstance(error, Exception) else TransferError("failed", repr(error)))
        elif end.ended:
            done.result().abort("the session has ended meanwhile")
        else:
            end.connect(done.result())


def slot_bytes(device: int) -> int:
    """A slot's size on a GPU: a thousandth of its memory, or so."""
    with bound(device) as drv:
        _, total = drv.mem_get_info()
    wanted = 1 << (max(1, total // _MEMORY_A_SLOT).bit_length() - 1)
    return min(max(wanted, _MIN_SLOT_BYTES), _MAX_SLOT_BYTES)


def _buffer(launcher: NcclLauncher, nbytes: int, undo: ExitStack) -> Buffer:
    """Some slots of so many bytes in the GPU's memory."""
    device = launcher.device
    with bound(device) as drv:
        base = drv.mem_alloc(SLOTS * nbytes)
    undo.callback(_free, device, base)
    copies = PolledCopies(device, launcher.watch)
    undo.callback(copies.close)
    return Buffer(tuple(base + slot * nbytes for slot in range(SLOTS)), nbytes, copies)


def _free(device: int, base: int) -> None:
    with bound(device) as drv:
        drv.mem_free(base)
