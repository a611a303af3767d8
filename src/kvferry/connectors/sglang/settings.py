"""What a user sets in SGLang's extra config."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.client import CacheClient

# Keys of the same dictionary that are SGLang's own; it takes most of them out before a back end sees it.
HICACHE_KEYS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
_Seconds = Annotated[float, Meta(gt=0, le=3600)]


class SGLangSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of both connectors.

    Parameters
    ----------
    url
        Where the cache server listens: "unix:///run/kvferry.sock".
    model_id
        Names the weights in place of what the connector finds out by itself; engines share KV where all of it is equal.
    answer_timeout_s
        After so long a question to the server is given up, and the server left alone for `pause_s`.
    load_timeout_s
        After so long a load is given up.
    pause_s
        How long a server that did not answer in time is asked nothing.
    disk_wait_s
        How long a request waits for KV that the server is loading from its lower tiers.
    staging_bytes
        Memory between SGLang's host pool and the server (HiCache only), of each rank.
    isolated_ipc
        Engine and server share no /dev/shm (isolated containers).
    token_file
        File with the line NAME:SECRET, for servers that want a token.
    """

    url: str
    model_id: str = ""
    answer_timeout_s: _Seconds = 2.0
    load_timeout_s: _Seconds = 10.0
    pause_s: _Seconds = 5.0
    disk_wait_s: Annotated[float, Meta(ge=0, le=3600)] = 1.0
    staging_bytes: Annotated[int, Meta(ge=1 << 20)] = 512 << 20
    isolated_ipc: bool = False
    token_file: str = ""

    def token(self) -> str | None:
        """The token, or None where none is set. Raises ValueError where the file cannot be read."""
        if not self.token_file:
            return None
        try:
            return Path(self.token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"token_file of KVferry's connector for SGLang: {error}") from None

    def connect(self) -> CacheClient:
        """A client of the server, be that there or not. Raises RequestError where it refuses this process."""
        return CacheClient(self.url, timeout_s=self.answer_timeout_s, token=self.token(), required=False)

    @classmethod
    def from_extra_config(
        cls, extra: Mapping[str, Any], *, where: str, foreign: Collection[str] = ()
    ) -> SGLangSettings:
        """Settings out of the dictionary named `where`, in which `foreign` keys are SGLang's.

        Raises ValueError for what is missing, unknown, or of the wrong type.
        """
        own = {name: value for name, value in extra.items() if name not in foreign}
        for name in own:
            if name not in cls.__struct_fields__:
                near = difflib.get_close_matches(name, cls.__struct_fields__, 1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ValueError(
                    f"{where} has {name!r}, which KVferry does not know{hint} "
                    f"Known are: {', '.join(cls.__struct_fields__)}"
                )
        if "url" not in own:
            raise ValueError(
                f'KVferry needs to know its cache server: put "url": "unix:///run/kvferry.sock" into {where}, and '
                "start one by: kvferry serve --socket /run/kvferry.sock"
            )
        try:
            return msgspec.convert(own, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"{where}: {error}") from None
