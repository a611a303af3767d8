"""What a caller has in hand of a transfer: when it ends, and how."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from kvferry.errors import DeadlineError, LayoutError, TransferError
from kvferry.p2p.streams import Use, current_stream

Done = Callable[["Transfer"], None]


class Transfer:
    """One call's transfer, of one part or several. Any thread may wait; callbacks run in the engine's thread."""

    def __init__(self, transfer_id: str, parts: int = 1) -> None:
        self.transfer_id = transfer_id
        self._lock = threading.Lock()  # guards the fields below; nothing is called while it is held
        self._left = parts
        self._error: TransferError | None = None
        self._ended = threading.Event()
        self._callbacks: list[Done] = []
        self._cancel: Callable[[], None] = lambda: None

    def done(self) -> bool:
        """Whether it has ended, well or not: nothing of its memory is touched any more."""
        return self._ended.is_set()

    @property
    def error(self) -> TransferError | None:
        """Why it has failed; None where it has not, or not yet."""
        with self._lock:
            error = self._error if self._left == 0 else None
        return None if error is None else type(error)(error.code, error.text)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end. Raises what it failed with; DeadlineError where it goes on: `cancel` ends it.

        Without `timeout_s` it is the lease, a claim's deadline, or a death that ends the wait.
        """
        if not self._ended.wait(timeout_s):
            raise DeadlineError(f"transfer {self.transfer_id!r} has not ended within {timeout_s:g} s; it goes on")
        error = self.error
        if error is not None:
            raise error

    def cancel(self) -> None:
        """Give it up; it ends, failed or not, once nothing touches its memory any more. Idempotent."""
        self._cancel()

    def add_done_callback(self, callback: Done) -> None:
        """Call it at the end; at once where that has come. It must not wait."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def on_cancel(self, cancel: Callable[[], None]) -> None:
        """For the engine: how to give it up."""
        self._cancel = cancel

    def part_ended(self, error: TransferError | None) -> None:
        """For the engine: one part has ended; the first error counts."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def __repr__(self) -> str:
        state = "under way" if not self.done() else f"failed: {self._error}" if self._error else "done"
        return f"<{type(self).__name__} {self.transfer_id!r}, {state}>"


class Sending(Transfer):
    """Something that is sent. Once it is done, its memory may be used for other things."""

    def __init__(self, transfer_id: str, parts: int = 1) -> None:
        super().__init__(transfer_id, parts)
        self._layer_ready: Callable[[int], None] = lambda _layer: None

    def layer_ready(self, layer: int) -> None:
        """The KV of this layer has been computed, or will be by what is queued on the current CUDA stream.

        Layers are numbers, in the order in which they were registered. Raises LayoutError for any other.
        """
        self._layer_ready(layer)

    def on_layer_ready(self, layer_ready: Callable[[int], None]) -> None:
        """For the engine: whom to tell."""
        self._layer_ready = layer_ready


class Receiving(Transfer):
    """Something that is awaited. Once it is done without an error, all of it is in place."""

    def __init__(self, transfer_id: str, parts: int = 1, items: int = 1) -> None:
        super().__init__(transfer_id, parts)
        self._item_left = [parts] * items
        self._landed = threading.Condition()
        self._tensor: torch.Tensor | None = None
        self._use = Use()

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> None:
        """Wait until one layer is in place, or all has ended. Raises as `wait` does, LayoutError for no layer."""
        layer = layer_number(layer, len(self._item_left))
        with self._landed:
            in_time = self._landed.wait_for(lambda: self._item_left[layer] <= 0 or self.done(), timeout_s)
        if not in_time:
            raise DeadlineError(f"layer {layer} of transfer {self.transfer_id!r} has not come within {timeout_s:g} s")
        error = self.error
        if error is not None:
            raise error

    def tensor(self, timeout_s: float | None = None) -> torch.Tensor:
        """Wait for a tensor, and take it: a second call raises TransferError ("taken").

        What the calling thread's current CUDA stream does with it is waited for before its memory is used again.
        """
        self.wait(timeout_s)
        with self._landed:
            tensor, self._tensor = self._tensor, None
        if tensor is None:
            raise TransferError("taken", f"tensor {self.transfer_id!r} has been taken already")
        self._use.stream = current_stream(tensor.device)
        return tensor

    def items_landed(self, items: Iterable[int]) -> None:
        """For the engine: one part of each of these items is in place."""
        with self._landed:
            for item in items:
                self._item_left[item] -= 1
            self._landed.notify_all()

    def give(self, tensor: torch.Tensor, use: Use | None = None) -> None:
        """For the engine: what came, before its part has ended; `use` where it is lent."""
        with self._landed:
            self._tensor, self._use = tensor, use or self._use

    def part_ended(self, error: TransferError | None) -> None:
        super().part_ended(error)
        with self._landed:
            self._landed.notify_all()


def layer_number(layer: int, layers: int) -> int:
    """The number of one of so many layers. Raises LayoutError for what is none, such as a name."""
    try:
        return range(layers).index(layer)
    except ValueError:
        where = "in the order in which they were registered"
        raise LayoutError(f"layer is {layer!r}; layers have the numbers 0 to {layers - 1}, {where}") from None
