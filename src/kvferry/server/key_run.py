"""A chain's keys as they travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from kvferry.errors import ProtocolError
from kvferry.protocol.messages import KEY_BYTES


class KeyRun(Sequence[bytes]):
    """The keys of a chain as they came, one after the other. Raises ProtocolError where they are no whole number."""

    def __init__(self, data: bytes) -> None:
        if len(data) % KEY_BYTES:
            raise ProtocolError(f"{len(data)} bytes of keys; each key has {KEY_BYTES}")
        self._data = data

    def __len__(self) -> int:
        return len(self._data) // KEY_BYTES

    def __iter__(self) -> Iterator[bytes]:
        size = KEY_BYTES
        return (self._data[start : start + size] for start in range(0, len(self._data), size))

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._data[index * KEY_BYTES : (index + 1) * KEY_BYTES]
