"""The base class of all wrappers: it exports a tensor in one process and opens it in another.

A sibling class gives `descriptor_type` and two methods, `_export` and `_open`; one that owns something also gives
`_release`; one that travels with file descriptors gives `num_fds`, `export_fd` and `_accept_fd`. Then it is entered in
the registry of `wire.py`: neither the wire format nor any receiver changes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

from kvferry.cuda.device import ordinal_of
from kvferry.errors import ShareError, UnsupportedMemoryError
from kvferry.ipc.descriptor import DTYPES, WrapperDescriptor

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_D = TypeVar("_D", bound=WrapperDescriptor)


def _check_shareable(tensor: torch.Tensor) -> None:
    """Refuse tensors whose bytes do not mean what shape, stride and dtype say."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedMemoryError(f"a {tensor.layout} {tensor.dtype} tensor cannot be shared: make it strided first")
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedMemoryError(
            "a lazily conjugated or negated view cannot be shared: call resolve_conj/resolve_neg"
        )
    if tensor.device.type == "meta" or tensor.numel() == 0:
        raise UnsupportedMemoryError(
            f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} has no bytes to share: leave it out"
        )
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise UnsupportedMemoryError(f"dtype {tensor.dtype} cannot travel: view the tensor as {', '.join(DTYPES)}")


class DeviceIPCWrapper(ABC):
    """One tensor's memory, made usable in another process.

    Made from a tensor it exports, and keeps the tensor alive until it is closed; made by `from_descriptor` it imports.
    Both kinds give the tensor by `to_tensor` and end with `close`. Closing never takes memory from under a living
    tensor: every tensor that `to_tensor` gave keeps its mapping until it is gone itself.

    Two wrappers are equal when they are of the very same class and describe the same memory.
    """

    descriptor_type: ClassVar[type[WrapperDescriptor]]
    _descriptor: WrapperDescriptor
    _tensor: torch.Tensor | None  # the exported tensor; None in an importer

    def __init__(self, tensor: torch.Tensor) -> None:
        """Export `tensor`; metadata is permuted where that makes the bytes one dense run, nothing is ever copied.

        Raises
        ------
        NotContiguousError
            The bytes are not one dense run.
        UnsupportedMemoryError
            This class cannot express that kind of memory.
        """
        self._begin()
        _check_shareable(tensor)
        descriptor, view = self._export(tensor.detach())
        self._descriptor, self._tensor = descriptor, view

    @classmethod
    def from_descriptor(cls, descriptor: WrapperDescriptor) -> Self:
        """The importing wrapper for a peer's `descriptor`; opens nothing yet."""
        if not isinstance(descriptor, cls.descriptor_type):
            raise TypeError(f"{cls.__name__} takes a {cls.descriptor_type.__name__}, got {type(descriptor).__name__}")
        wrapper = cls.__new__(cls)
        wrapper._begin()
        wrapper._descriptor = descriptor
        return wrapper

    def _begin(self) -> None:
        """Set the state of both kinds; a sibling with more state extends this. Runs before `_export`."""
        self._tensor = None
        self._lock = threading.Lock()  # guards the two flags only
        self._closed = False
        self._opened = False  # whether an importer holds anything that close() has to give back

    @abstractmethod
    def _export(self, tensor: torch.Tensor) -> tuple[WrapperDescriptor, torch.Tensor]:
        """Describe `tensor`; also return the view of it that the descriptor describes, which is kept alive."""

    @abstractmethod
    def _open(self) -> torch.Tensor:
        """Importer: map the memory (once) and return a tensor that keeps the mapping alive by itself."""

    def _release(self) -> None:  # noqa: B027  a wrapper that owns nothing needs none
        """Give back what this wrapper holds, without harm to tensors already given; called once, never raises."""

    @property
    def descriptor(self) -> WrapperDescriptor:
        return self._descriptor

    def _described(self, kind: type[_D]) -> _D:
        """The descriptor as the sibling's own type."""
        assert isinstance(self._descriptor, kind)
        return self._descriptor

    @property
    def dtype(self) -> torch.dtype:
        return self._descriptor.torch_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._descriptor.shape

    @property
    def stride(self) -> tuple[int, ...]:
        return self._descriptor.stride

    @property
    def storage_offset(self) -> int:
        return self._descriptor.storage_offset

    @property
    def device_ordinal(self) -> int | None:
        """The device's number in this process; None for the host. Raises UnknownDeviceError where it is not visible."""
        return ordinal_of(self.device_uuid) if self.device_uuid else None

    @property
    def device_uuid(self) -> str:
        return self._descriptor.device_uuid

    @property
    def num_fds(self) -> int:
        """How many file descriptors travel beside the descriptor."""
        return 0

    def export_fd(self, index: int) -> int:
        """A new file descriptor for place `index`; the caller closes it."""
        raise IndexError(f"{type(self).__name__} has {self.num_fds} file descriptors, asked for number {index}")

    def import_fd(self, index: int, fd: int) -> None:
        """Take file descriptor `fd` for place `index`; it is closed here, also when this raises."""
        try:
            if not 0 <= index < self.num_fds:
                raise IndexError(
                    f"{type(self).__name__} takes {self.num_fds} file descriptors, got one for place {index}"
                )
            with self._lock:
                if self._closed or self._tensor is not None:
                    raise ShareError(f"{self!r} takes no file descriptor")
            self._accept_fd(index, fd)
            self._opened = True
        except OSError as error:
            raise ShareError(f"file descriptor {fd} cannot be taken in by {self!r}: {error}") from error
        finally:
            with contextlib.suppress(OSError):  # not open at all: said above
                os.close(fd)

    def _accept_fd(self, index: int, fd: int) -> None:
        """Map, import or duplicate `fd`, which the caller closes afterwards; `index` is in range."""
        raise NotImplementedError

    def to_tensor(self) -> torch.Tensor:
        """The tensor: the exported one in its exporter, else one over the mapped memory.

        Raises
        ------
        ShareError
            The wrapper is closed, its file descriptors have not come, or the memory cannot be opened.
        """
        with self._lock:
            if self._closed:
                raise ShareError(f"{self!r} is closed: call to_tensor() before close()")
            exported = self._tensor
        if exported is not None:
            return exported
        tensor = self._open()
        self._opened = True
        return tensor

    def close(self) -> None:
        """Give back what the wrapper holds; idempotent, any thread, tensors already given stay valid."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tensor = None
        self._release()

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, DeviceIPCWrapper)
        return self._descriptor == other._descriptor

    def __hash__(self) -> int:
        return hash((type(self), self._descriptor))

    def __repr__(self) -> str:
        state = "closed" if self._closed else "imported" if self._tensor is None else "exported"
        head = f"{type(self).__name__}({self._descriptor.dtype}{list(self.shape)}"
        return f"{head} on {self.device_uuid or 'host'}, {state})"

    def __del__(self) -> None:
        # An export that raised leaves an object without these fields.
        if getattr(self, "_opened", False) and not self._closed:
            text = f"{self!r} was not closed"
            self.close()
            warnings.warn(text, ResourceWarning, stacklevel=1, source=self)
