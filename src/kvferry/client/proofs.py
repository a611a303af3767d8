"""How a client sees that the server maps the very memory that it was given: by bytes that both of them read."""

from __future__ import annotations

import contextlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from kvferry.client.storages import Storages
from kvferry.errors import ShareError
from kvferry.protocol.messages import NONCE_BYTES

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class MappingProof(ABC):
    """The server is to read at `offsets`: bytes, one a storage; at the start of each where there are none."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self.offsets: tuple[int, ...] = ()

    @abstractmethod
    def _expected(self) -> Sequence[bytes]:
        """What is there."""

    def check(self, read: Sequence[bytes]) -> None:
        """Raise ShareError unless the server has read exactly what is there."""
        expected = self._expected()
        if len(read) != len(expected):
            raise ShareError(f"the server mapped {len(read)} storages of {len(expected)}")
        for index, (here, there) in enumerate(zip(expected, read, strict=True)):
            if here != there:
                wrapper = self._storages.wrappers[index]
                raise ShareError(
                    f"the server reads other bytes than are in storage {index} ({wrapper!r}), so it has not mapped "
                    "this memory: check that both processes see the same devices and, for kinds of sharing that need "
                    "it, one pid namespace"
                )


class Nonces(MappingProof):
    """Random bytes at the start of each storage; what was there comes back at the end of `with`.

    Nobody may use the memory meanwhile.
    """

    def __init__(self, storages: Storages) -> None:
        super().__init__(storages)
        self._heads = [flat[:NONCE_BYTES] for flat in storages.flats]
        self._before = [head.clone() for head in self._heads]
        self._written = [os.urandom(len(head)) for head in self._heads]

    def _expected(self) -> Sequence[bytes]:
        return self._written

    def __enter__(self) -> Self:
        for head, nonce in zip(self._heads, self._written, strict=True):
            head.copy_(torch.frombuffer(bytearray(nonce), dtype=torch.uint8))
        self._storages.synchronize()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for head, before in zip(self._heads, self._before, strict=True):
            head.copy_(before)
        self._storages.synchronize()


class Probes(MappingProof):
    """Places in the storages, chosen at random; nothing is written, so that the memory may be in use.

    Where it changes in that very moment the check fails, and is worth another try. `at_start` is for servers that can
    read nowhere else.
    """

    def __init__(self, storages: Storages, *, at_start: bool) -> None:
        super().__init__(storages)
        places = [max(1, flat.numel() // NONCE_BYTES) for flat in storages.flats]
        self._starts = [0 if at_start else secrets.randbelow(count) * NONCE_BYTES for count in places]
        self.offsets = () if at_start else tuple(self._starts)

    def _expected(self) -> Sequence[bytes]:
        device = self._storages.device
        # On a stream of its own, since the default one waits for the engine's.
        with _aside(device) if device.type == "cuda" else contextlib.nullcontext():
            return [
                flat[start : start + NONCE_BYTES].cpu().numpy().tobytes()
                for flat, start in zip(self._storages.flats, self._starts, strict=True)
            ]


def _aside(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
