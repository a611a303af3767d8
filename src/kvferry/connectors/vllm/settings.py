"""What a user sets in `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

_CONNECTOR = "KVFerryConnector"
_Seconds = Annotated[float, Meta(gt=0, le=3600)]


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the connector.

    Parameters
    ----------
    url
        Where the cache server listens: "unix:///run/kvferry.sock".
    model_id
        Names the weights in place of what the connector finds out by itself; engines share KV where all of it is equal.
    store_generated
        Keep the KV of generated tokens, too, not only that of prompts.
    isolated_ipc
        Engine and server share no /dev/shm (isolated containers).
    disk_wait_s
        How long a request waits for KV that the server is loading from its lower tiers.
    load_timeout_s
        After so long a load is given up, and the tokens are computed.
    token_file
        File with the line NAME:SECRET, for servers that want a token.
    """

    url: str
    model_id: str = ""
    store_generated: bool = False
    isolated_ipc: bool = False
    disk_wait_s: Annotated[float, Meta(ge=0, le=3600)] = 2.0
    load_timeout_s: _Seconds = 10.0
    token_file: str = ""

    def token(self) -> str | None:
        """The token, or None where none is set. Raises ValueError where the file cannot be read."""
        return read_secret("token_file", self.token_file, _CONNECTOR)

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Settings out of vLLM's dictionary. Raises ValueError for what is missing, unknown, or of the wrong type."""
        check_names(extra, cls.__struct_fields__, _CONNECTOR)
        if "url" not in extra:
            raise ValueError(
                "KVFerryConnector needs to know its cache server: set kv_connector_extra_config "
                '{"url": "unix:///run/kvferry.sock"}, and start one by: kvferry serve --socket /run/kvferry.sock'
            )
        try:
            return msgspec.convert(dict(extra), cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"kv_connector_extra_config of KVFerryConnector: {error}") from None


def check_names(found: Iterable[str], known: Sequence[str], connector: str) -> None:
    """Raise ValueError for a name that is not among those known, with the nearest that is."""
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(
                f"kv_connector_extra_config has {name!r}, which {connector} does not know{hint} "
                f"Known are: {', '.join(known)}"
            )


def read_secret(name: str, path: str, connector: str) -> str | None:
    """What the file that a setting names has in it; None where it names none. Raises ValueError."""
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} of {connector}: {error}") from None
