"""KVferry as a storage back end of SGLang's HiCache."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvferry.client import CacheClient
from kvferry.connectors.sglang import interface
from kvferry.connectors.sglang.host_pool import HostPages, host_pages
from kvferry.connectors.sglang.identity import RankIdentity, model_name
from kvferry.connectors.sglang.page_store import PageStore
from kvferry.connectors.sglang.questions import Questions
from kvferry.connectors.sglang.settings import HICACHE_KEYS, SGLangSettings
from kvferry.connectors.sglang.staging import Staging, numbers_of_pages
from kvferry.errors import DeadlineError, LayoutError, ServerGoneError
from kvferry.layout import ChunkKeys

_LOG = logging.getLogger("sglang.kvferry")
_WHERE = "--hicache-storage-backend-extra-config"
_UNUSED = "KVferry is used by pages: set interface_v1 to 1 in " + _WHERE
_T = TypeVar("_T")


class KVFerryStorage(HiCacheStorage):
    """Keeps the pages of SGLang's host pool in a cache server; `--hicache-storage-backend dynamic`.

    SGLang calls it from a thread that asks, one that reads and one that writes, of each scheduler process. No call
    raises once the pool is registered: what the server cannot do now is a miss, or not kept.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ValueError(_UNUSED)
        interface.check_release(interface.release())
        self._settings = SGLangSettings.from_extra_config(extra, where=_WHERE, foreign=HICACHE_KEYS)
        self._config = storage_config
        self._rank = _rank_of(storage_config)
        self._client: CacheClient | None = None
        self._questions: Questions | None = None
        self._store: PageStore | None = None
        self._is_told_of_others = False

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Raises LayoutError for a pool that cannot be kept, RequestError where the server refuses this process."""
        super().register_mem_pool_host(mem_pool_host)
        pool = host_pages(mem_pool_host, shared=self._rank.shared)
        staging = Staging(pool, self._settings.staging_bytes)
        settings = self._settings
        client = settings.connect()
        with contextlib.ExitStack() as undo:
            undo.callback(client.close)
            self._register(client, pool, staging)
            undo.pop_all()
        self._client = client
        self._questions = Questions(
            client,
            page_tokens=pool.page_tokens,
            pause_s=settings.pause_s,
            answer_timeout_s=settings.answer_timeout_s,
        )
        self._store = PageStore(
            client, pool, staging=staging, questions=self._questions, timeout_s=settings.load_timeout_s
        )

    def _register(self, client: CacheClient, pool: HostPages, staging: Staging) -> None:
        settings, engine_id = self._settings, f"sglang-{uuid.uuid4().hex}"
        model = model_name(
            interface.server_args(),
            self._rank,
            model_id=settings.model_id,
            release=interface.release(),
            engine_id=engine_id,
            layers=pool.layers,
        )
        try:
            client.register_kv_caches(
                {"pages": staging.pages},
                engine_id=engine_id,
                model=model,
                format=pool.format,
                hints=pool.hints(),
                chunk_tokens=pool.page_tokens,
            )
        except (DeadlineError, ServerGoneError) as error:
            _LOG.warning("the cache server at %s does not answer: no KV is kept or found: %s", settings.url, error)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages at the start of `keys` are there. What lower tiers have is loaded meanwhile."""
        prefix = getattr(extra_info, "prefix_keys", None) or []

        def ask() -> int:
            wait_s = self._settings.disk_wait_s
            return self._asking.count(_data(keys), prefix=_data(prefix), wait_s=wait_s)

        return min(self._quietly(ask, 0), len(keys))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Fill pages of the host pool; False for those, from some page on, that hold what they held before."""

        def fetch() -> int:
            return self._keeper.fetch(_data(keys), self._pages(keys, host_indices))

        return _leading(self._quietly(fetch, 0), len(keys))

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Keep pages of the host pool; False for those, from some page on, that are not there now."""
        if not self._rank.writes:
            return [True] * len(keys)  # another rank keeps the same
        before = (getattr(extra_info, "prefix_keys", None) or [])[-1:]

        def keep() -> int:
            return self._keeper.keep(_data(keys), self._pages(keys, host_indices), before=_data(before))

        return _leading(self._quietly(keep, 0), len(keys))

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The same for models with more than one pool: nothing, since one without the others is of no use."""
        from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

        if not pool_transfers:
            return PoolTransferResult(self.batch_exists(keys, extra_info), {})
        self._tell_of_others(pool_transfers)
        return PoolTransferResult.empty()

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Nothing."""
        return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Nothing."""
        self._tell_of_others(transfers)
        return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}

    def clear(self) -> bool:
        """Forget all that is stored of this model, by whichever engine; whether that is done."""

        def forget() -> bool:
            assert self._client is not None
            self._client.clear()
            return True

        return self._quietly(forget, False)

    def close(self) -> None:
        """Hang up. Idempotent. SGLang calls it where the back end is detached, not at its own end."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def exists(self, key: str) -> bool:
        """Whether one page is there."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Not used: see `batch_get_v1`. Nothing."""
        return

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Not used. Nothing."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not used. Nothing is kept."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not used. Nothing is kept."""
        return False

    @property
    def _asking(self) -> Questions:
        if self._questions is None:
            raise ServerGoneError("no host pool was registered")
        return self._questions

    @property
    def _keeper(self) -> PageStore:
        if self._store is None:
            raise ServerGoneError("no host pool was registered")
        return self._store

    def _pages(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[int]:
        pages = numbers_of_pages(host_indices, self.mem_pool_host.page_size)
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages for {len(keys)} keys")
        return pages

    @staticmethod
    def _quietly(do: Callable[[], _T], otherwise: _T) -> _T:
        """SGLang before 0.5.22 loses the thread that meets an exception, and with it its storage, without a word."""
        try:
            return do()
        except Exception as error:  # noqa: BLE001 - whatever it is, the tokens can be computed
            _LOG.warning("a call of KVferry's storage failed: %s: %s", type(error).__name__, error)
            return otherwise

    def _tell_of_others(self, transfers: Any) -> None:
        if not self._is_told_of_others:
            self._is_told_of_others = True
            names = ", ".join(str(transfer.name) for transfer in transfers)
            _LOG.warning("this model has more than one pool (%s): KVferry keeps and finds nothing of it", names)


def _rank_of(config: Any) -> RankIdentity:
    """Raises LayoutError where ranks have other tokens of a page."""
    if getattr(config, "dcp_size", 1) > 1:
        raise LayoutError("decode context parallelism is on: each rank has other tokens of a page; not supported")
    return RankIdentity(
        config.tp_rank,
        config.tp_size,
        getattr(config, "pp_rank", 0),
        getattr(config, "pp_size", 1),
        getattr(config, "attn_cp_rank", 0),
        getattr(config, "attn_cp_size", 1),
        shared=bool(config.is_mla_model),
    )


def _data(keys: Sequence[str]) -> bytes:
    return ChunkKeys.from_hex(keys).data


def _leading(count: int, total: int) -> list[bool]:
    return [place < count for place in range(total)]
