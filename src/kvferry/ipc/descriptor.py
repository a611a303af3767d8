"""The inert record of one shared tensor: what travels, checked when made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, TypedDict

import msgspec
import torch

MAX_DIMS = 16
MAX_BYTES = 1 << 62
TOKEN_BYTES = 16

_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)

# What this torch knows of the dtypes that may travel, by name without "torch.".
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
)


class CommonFields(TypedDict):
    """The fields that every descriptor has, as keyword arguments of its constructor."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    device_uuid: str
    exporter: bytes


class WrapperDescriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """What one wrapper says about its tensor; inert, checked when made, safe to build from a peer's bytes.

    `dtype` has no "torch." before it; `shape` and `stride` count elements; `storage_offset` is in elements too;
    `device_uuid` is "" for host memory; `exporter` is the exporting process's token.
    """

    dtype: str
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMS)]
    stride: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMS)]
    storage_offset: int
    device_uuid: str
    exporter: bytes

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype[:40]!r} is not one of {', '.join(DTYPES)}")
        if len(self.shape) != len(self.stride) or len(self.shape) > MAX_DIMS:
            raise ValueError(
                f"{len(self.shape)} sizes and {len(self.stride)} strides: wanted equally many, at most {MAX_DIMS}"
            )
        if min((*self.shape, *self.stride, self.storage_offset)) < 0:
            raise ValueError(f"negative size, stride or offset in {self.shape}, {self.stride}, {self.storage_offset}")
        if max(self.num_bytes, (self.storage_offset + self.extent) * self.itemsize, *self.stride, 0) >= MAX_BYTES:
            raise ValueError(f"shape {self.shape} with stride {self.stride} names 2**62 bytes or more")
        if len(self.exporter) != TOKEN_BYTES:
            raise ValueError(f"an exporter's token has {TOKEN_BYTES} bytes, got {len(self.exporter)}")
        if len(self.device_uuid) > 64 or not self.device_uuid.isascii():
            raise ValueError(f"device UUID {self.device_uuid[:64]!r} is too long or not ASCII")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements, laid side by side."""
        return self.num_elements * self.itemsize

    @property
    def extent(self) -> int:
        """Elements from the first to just after the last one, gaps counted."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are one dense run in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def common_fields(tensor: torch.Tensor, *, device_uuid: str, exporter: bytes) -> CommonFields:
    """The common fields for `tensor` as it is."""
    return CommonFields(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        storage_offset=int(tensor.storage_offset()),
        device_uuid=device_uuid,
        exporter=exporter,
    )


def check_dense_run(descriptor: WrapperDescriptor, offset: int, nbytes: int, *, total_bytes: int) -> None:
    """Refuse what is not a dense, aligned run of `nbytes` bytes at byte `offset` of `total_bytes`.

    Raises ValueError.
    """
    if not descriptor.is_contiguous or nbytes != descriptor.num_bytes or nbytes == 0:
        raise ValueError(f"shape {descriptor.shape}, stride {descriptor.stride} is not a dense run of {nbytes} bytes")
    if offset % descriptor.itemsize:
        raise ValueError(f"offset {offset} is not aligned to {descriptor.dtype}")
    if not 0 <= offset <= offset + nbytes <= total_bytes:
        raise ValueError(f"bytes {offset} to {offset + nbytes} of {total_bytes}")
