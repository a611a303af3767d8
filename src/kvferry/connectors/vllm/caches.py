"""What vLLM's KV cache tensors are: a format by their shapes, and hints that must agree with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kvferry.errors import LayoutError
from kvferry.layout import LayoutHints


class TensorLike(Protocol):
    """What is asked of a tensor here."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def element_size(self) -> int: ...


def choose_format(kv_caches: Mapping[str, TensorLike], specs: Mapping[str, Any], num_blocks: int) -> str:
    """The name of the layout format of these tensors, one of `kvferry.layout.FORMATS`.

    `specs` are vLLM's KV cache specs by layer. Raises LayoutError for tensors of different or unknown formats, and
    where a tensor has not the bytes that vLLM's configuration says: then it holds more than this view shows.
    """
    formats = {_format(name, tensor.shape, _is_mla(specs.get(name)), num_blocks) for name, tensor in kv_caches.items()}
    if len(formats) > 1:
        raise LayoutError(f"layers of the formats {' and '.join(sorted(formats))}; all must have the same")
    for name, tensor in kv_caches.items():
        if name in specs:
            _check_bytes(name, tensor, specs[name], num_blocks)
    return formats.pop()


def hints_for(block_size: int, num_blocks: int, *, isa: str) -> LayoutHints:
    """What vLLM's configuration says of the tensors; registering fails where they say otherwise."""
    return LayoutHints(tokens_per_block=block_size, num_blocks=num_blocks, isa=isa)


def _format(name: str, shape: tuple[int, ...], is_mla: bool, num_blocks: int) -> str:
    if len(shape) == 3 or (len(shape) == 4 and is_mla):
        return "mla"
    if len(shape) == 4:
        return "vllm_packed"
    if len(shape) == 5:
        # A block axis counts kernel blocks, of which one or more make a block of the engine.
        first, second = (shape[0] == 2 and shape[1] % num_blocks == 0), (shape[1] == 2 and shape[0] % num_blocks == 0)
        if first != second:
            return "vllm_flash_attention" if first else "vllm_flashinfer"
    raise LayoutError(f"layer {name} has a KV cache of shape {tuple(shape)} for {num_blocks} blocks; it is not known")


def _is_mla(spec: Any) -> bool:
    return type(spec).__name__ == "MLAAttentionSpec"


def _check_bytes(name: str, tensor: TensorLike, spec: Any, num_blocks: int) -> None:
    found = tensor.element_size()
    for size in tensor.shape:
        found *= size
    found, rest = divmod(found, num_blocks)
    said = {spec.page_size_bytes, getattr(spec, "real_page_size_bytes", spec.page_size_bytes)}
    if rest or found not in said:
        raise LayoutError(
            f"layer {name}: the tensor has {found} bytes a block, vLLM's configuration says "
            f"{' or '.join(map(str, sorted(said)))}; what lies in the others is not known"
        )
