"""What a user sets: in the environment, or in a TOML file, since TensorRT-LLM's configuration takes nothing else."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "KVFERRY_TRTLLM_"
FILE_VARIABLE = PREFIX + "CONFIG"
_Seconds = Annotated[float, Meta(gt=0, le=3600)]


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the connector.

    Parameters
    ----------
    url
        Where the cache server listens: "unix:///run/kvferry.sock".
    model_id
        Names the weights in place of what the connector finds out by itself; engines share KV where all of it is equal.
    isolated_ipc
        Engine and server share no /dev/shm (isolated containers).
    lookup_timeout_s
        How long the engine stands still for a server that does not answer; it is left alone for a while then.
    disk_wait_s
        How long the engine stands still for KV that the server is loading from its lower tiers.
    load_timeout_s
        After so long a load has failed, which ends the engine: the interface knows no other way.
    token_file
        File with the line NAME:SECRET, for servers that want a token.
    """

    url: str
    model_id: str = ""
    isolated_ipc: bool = False
    lookup_timeout_s: _Seconds = 1.0
    disk_wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    load_timeout_s: _Seconds = 10.0
    token_file: str = ""

    def token(self) -> str | None:
        """The token, or None where none is set. Raises ValueError where the file cannot be read."""
        if not self.token_file:
            return None
        try:
            return Path(self.token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"token_file of KVferry's connector: {error}") from None


def read_settings(llm_args: Any, environment: Mapping[str, str] = os.environ) -> ConnectorSettings:
    """Settings out of the file that KVFERRY_TRTLLM_CONFIG names; variables KVFERRY_TRTLLM_URL and so on go before it.

    Where neither has a url, it is the `server_url` of TensorRT-LLM's own `kv_connector_config`, which later releases
    have. Raises ValueError for what is missing, unknown, or of the wrong type.
    """
    found: dict[str, Any] = {}
    server_url = getattr(getattr(llm_args, "kv_connector_config", None), "server_url", None)
    if server_url:
        found["url"] = str(server_url)
    path = environment.get(FILE_VARIABLE)
    if path:
        values = _read_file(Path(path))
        _check_names(values, path)
        found |= values
    values = {
        name[len(PREFIX) :].lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name != FILE_VARIABLE
    }
    _check_names(values, f"the environment ({PREFIX}...)")
    found |= values
    if "url" not in found:
        raise ValueError(
            f"KVferry's connector needs to know its cache server: set {PREFIX}URL=unix:///run/kvferry.sock for all "
            "ranks, and start one by: kvferry serve --socket /run/kvferry.sock"
        )
    try:
        return msgspec.convert(found, ConnectorSettings, strict=False)  # variables are text
    except msgspec.ValidationError as error:
        raise ValueError(f"settings of KVferry's connector: {error}") from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{FILE_VARIABLE} of KVferry's connector: {path}: {error}") from None
    return found


def _check_names(values: Mapping[str, Any], where: str) -> None:
    known = ConnectorSettings.__struct_fields__
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(
                f"{where} sets {name!r}, which KVferry's connector does not know{hint} Known are: {', '.join(known)}"
            )
