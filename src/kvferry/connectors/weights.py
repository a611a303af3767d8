"""A name for weights that says what they are, not only where they came from."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path

from kvferry.layout.keys import digest

_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json"})
# Files of tokenizers and the like may differ between copies of one checkpoint, and say nothing about KV.
_NO_WEIGHTS = ("tokenizer", "special_tokens", "generation_config", "preprocessor", "processor", "vocab", "merges")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SAMPLES = 16
_SAMPLE_BYTES = 4096


def weights_name(model: str, revision: str) -> str | None:
    """A name for the weights `model`; None where nothing here says what they are.

    Reading all of a large model takes minutes. A file in the Hugging Face cache has its content's hash as its name, and
    a full commit hash names its content, too. Any other file is named by size, time of change and samples, so a
    checkpoint written anew under its old path has another name, and so has a copy with other times: KV is then not
    shared, which a setting can change.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return f"file:{_content(path).hex()}"
    folder = model_folder(model, revision)
    found = None if folder is None else files_digest(folder)
    if found is None:
        return f"commit:{model}@{revision}" if _COMMIT.fullmatch(revision) else None
    return f"files:{found}"


def weights_or_own(
    model: str, revision: str, load_format: str, *, engine_id: str, setting: str, log: logging.Logger
) -> str:
    """The name of an engine's weights; where nothing says what they are, one that no other engine has.

    `setting` is what a user sets to name them, `log` where the engine's own lines go.
    """
    if load_format.lower().endswith("dummy"):
        return f"of engine:{engine_id}"
    name = weights_name(model, revision)
    if name is not None:
        return name
    log.warning(
        "nothing on this host says what the weights of %s are, so this engine shares KV with no other. If they never "
        "change under that name, set %s.",
        model,
        setting,
    )
    return f"of engine:{engine_id}"


def model_folder(model: str, revision: str) -> Path | None:
    """The folder `model`, or its snapshot in the Hugging Face cache; None where this host has neither."""
    path = Path(model).expanduser()
    return path if path.is_dir() else _hub_folder(model, revision)


def files_digest(folder: Path) -> str | None:
    """What the weights and configurations in `folder` are, in hex; None where it has no weights."""
    files = sorted(path for path in folder.iterdir() if _counts(path))
    if all(path.suffix == ".json" for path in files):
        return None
    return digest([part for path in files for part in (path.name.encode(), _content(path))]).hex()


def _hub_folder(model: str, revision: str) -> Path | None:
    """The snapshot of `model` in the Hugging Face cache of this host."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    for name in ("config.json", "adapter_config.json"):
        try:
            found = try_to_load_from_cache(model, name, revision=revision or None)
        except ValueError:  # not a name that a repository can have, e.g. a URL
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def _counts(path: Path) -> bool:
    return path.suffix in _SUFFIXES and not path.name.startswith(_NO_WEIGHTS) and path.is_file()


def _content(path: Path) -> bytes:
    target = path.resolve()
    if path.is_symlink() and target.parent.name == "blobs":
        return target.name.encode()
    found = hashlib.sha256()
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if path.suffix == ".json":  # small, and copied about
            return hashlib.sha256(file.read()).digest()
        found.update(f"{status.st_size} {status.st_mtime_ns}".encode())
        for index in range(_SAMPLES):
            file.seek(max(0, status.st_size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            found.update(file.read(_SAMPLE_BYTES))
    return found.digest()
