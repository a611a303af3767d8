"""The one wire format of wrappers: msgpack, versioned, checked; reading it opens nothing.

A message is `{"kvferry": VERSION, "wrappers": [...]}`. Every wrapper is one extension value of code `EXT_CODE`, the
code of the base class; inside is the descriptor, whose `kind` names the concrete class out of `WRAPPER_TYPES`. A list
may mix kinds, and a new kind is one more entry there. Nothing is ever unpickled: bytes can choose among these classes,
and fill in fields that are checked, and no more.

`enc_hook` and `ext_hook` let other msgspec messages carry `DeviceIPCWrapper` fields in the same form.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Union

import msgspec

from kvferry.errors import WireError
from kvferry.ipc.descriptor import WrapperDescriptor
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.raw import RawCudaIPCWrapper
from kvferry.ipc.torch_storage import CudaIPCWrapper
from kvferry.ipc.vmm import VmmCudaIPCWrapper
from kvferry.ipc.wrapper import DeviceIPCWrapper

VERSION = 1
EXT_CODE = 1
MAX_MESSAGE_BYTES = 16 << 20
MAX_WRAPPERS = 65_536
# File descriptors beside one message. A few bytes can ask for one, and the receiver keeps a note of each.
MAX_FDS = 1 << 18

# The closed registry: the kinds of wrapper that bytes from a peer can become.
WRAPPER_TYPES: tuple[type[DeviceIPCWrapper], ...] = (
    CudaIPCWrapper,
    RawCudaIPCWrapper,
    VmmCudaIPCWrapper,
    HostIPCWrapper,
)

_BY_DESCRIPTOR: Mapping[type[WrapperDescriptor], type[DeviceIPCWrapper]] = MappingProxyType(
    {kind.descriptor_type: kind for kind in WRAPPER_TYPES}
)


class _Header(msgspec.Struct):
    """The part that all versions share."""

    kvferry: int


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    kvferry: int
    wrappers: Annotated[list[DeviceIPCWrapper], msgspec.Meta(max_length=MAX_WRAPPERS)]


def enc_hook(value: object) -> msgspec.msgpack.Ext:
    """For msgspec encoders: any wrapper as an extension value."""
    if isinstance(value, DeviceIPCWrapper):
        return msgspec.msgpack.Ext(EXT_CODE, msgspec.msgpack.encode(value.descriptor))
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


def ext_hook(code: int, data: memoryview) -> DeviceIPCWrapper:
    """For msgspec decoders: the importing wrapper for an extension value; opens nothing.

    Raises
    ------
    WireError
        Another extension, an unknown kind, or a descriptor that does not hold together.
    """
    if code != EXT_CODE:
        raise WireError(f"extension {code} is not the wrapper's, which is {EXT_CODE}")
    try:
        descriptor = _DESCRIPTORS.decode(data)
    except _DECODING_ERRORS as error:
        raise WireError(f"not a wrapper of a known kind ({', '.join(_kinds())}): {error}") from error
    return _BY_DESCRIPTOR[type(descriptor)].from_descriptor(descriptor)


def _kinds() -> list[str]:
    return [str(kind.__struct_config__.tag) for kind in _BY_DESCRIPTOR]


_DECODING_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
_DESCRIPTORS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Union[tuple(_BY_DESCRIPTOR)])  # noqa: UP007
_HEADERS = msgspec.msgpack.Decoder(_Header)
_MESSAGES = msgspec.msgpack.Decoder(_Message, ext_hook=ext_hook)


def encode_descriptors(wrappers: Sequence[DeviceIPCWrapper]) -> bytes:
    """The message for `wrappers`, without their file descriptors.

    Raises
    ------
    ValueError
        There are too many wrappers for one message.
    """
    if len(wrappers) > MAX_WRAPPERS:
        raise ValueError(f"one message takes {MAX_WRAPPERS} wrappers, got {len(wrappers)}: send several")
    num_fds = sum(wrapper.num_fds for wrapper in wrappers)
    if num_fds > MAX_FDS:
        raise ValueError(f"one message takes {MAX_FDS} file descriptors, got {num_fds}: send several")
    data = msgspec.msgpack.encode({"kvferry": VERSION, "wrappers": list(wrappers)}, enc_hook=enc_hook)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"one message takes {MAX_MESSAGE_BYTES} bytes, got {len(data)}: send several")
    return data


def decode_descriptors(data: bytes | bytearray | memoryview) -> list[DeviceIPCWrapper]:
    """The importing wrappers of a message; their file descriptors are still to come, through `import_fd`.

    Raises
    ------
    WireError
        The bytes are not a whole, valid message of this version, and nothing else.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        version = _HEADERS.decode(data).kvferry
        if version != VERSION:
            raise WireError(f"wire format {version} is not spoken here, only {VERSION}: update the older side")
        wrappers = _MESSAGES.decode(data).wrappers
    except WireError:
        raise
    except _DECODING_ERRORS as error:
        raise WireError(f"not a list of wrappers: {error}") from error
    num_fds = sum(wrapper.num_fds for wrapper in wrappers)
    if num_fds > MAX_FDS:
        raise WireError(f"a message that needs {num_fds} file descriptors; at most {MAX_FDS} are taken")
    return wrappers


def fd_slots(wrappers: Iterable[DeviceIPCWrapper]) -> list[tuple[DeviceIPCWrapper, int]]:
    """Where the file descriptors of `wrappers` go, in the order in which they travel: (wrapper, place in it)."""
    return [(wrapper, index) for wrapper in wrappers for index in range(wrapper.num_fds)]


def encode(wrappers: Sequence[DeviceIPCWrapper]) -> tuple[bytes, list[int]]:
    """The message for `wrappers`, and the file descriptors that must travel beside it, which the caller closes.

    All of them are open at once; `send` keeps that bounded.
    """
    data = encode_descriptors(wrappers)
    fds: list[int] = []
    try:
        for wrapper, index in fd_slots(wrappers):
            fds.append(wrapper.export_fd(index))
    except BaseException:
        close_fds(fds)
        raise
    return data, fds


def decode(data: bytes | bytearray | memoryview, fds: Sequence[int] = ()) -> list[DeviceIPCWrapper]:
    """The importing wrappers of a message and the file descriptors that came with it.

    Takes every one of `fds`, and closes all of them, also on error; on error nothing stays open.

    Raises
    ------
    WireError
        The bytes are no valid message, or the number of file descriptors is not what it needs.
    ShareError
        A file descriptor is not what the message says.
    """
    left = list(dict.fromkeys(fds))
    wrappers: list[DeviceIPCWrapper] = []
    try:
        if len(left) != len(fds):
            raise WireError("the same file descriptor was given twice")
        wrappers = decode_descriptors(data)
        slots = fd_slots(wrappers)
        if len(slots) != len(left):
            raise WireError(f"the message needs {len(slots)} file descriptors, {len(left)} came")
        for wrapper, index in slots:
            wrapper.import_fd(index, left.pop(0))
    except BaseException:
        close_fds(left)
        for wrapper in wrappers:
            wrapper.close()
        raise
    return wrappers


def close_fds(fds: Iterable[int]) -> None:
    """Close all of `fds`, also those after one that is not open."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
