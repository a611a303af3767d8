"""KVferry as SGLang's external linker: the cache server reads and fills slots of the device's KV cache."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvferry.connectors.sglang import interface
from kvferry.connectors.sglang.device_pool import block_ids, check_set_up, device_caches, is_latent, num_layers
from kvferry.connectors.sglang.identity import RankIdentity, model_name
from kvferry.connectors.sglang.loads import Loads, QueuedLoad
from kvferry.connectors.sglang.offloads import Offloads
from kvferry.connectors.sglang.promises import Promises
from kvferry.connectors.sglang.questions import Questions
from kvferry.connectors.sglang.settings import SGLangSettings
from kvferry.errors import DeadlineError, ServerGoneError
from kvferry.ipc.policy import IPCPolicy
from kvferry.layout import ChunkKeys

_LOG = logging.getLogger("sglang.kvferry")
_WHERE = "linker_extra_config of --unified-cache-external-linker-config"
_OFFLOADED_SHARE = 8  # at most this part of the device's pages is being read at a time


class KVFerryLinker(UnifiedCacheLinker):
    """Restores prefixes from a cache server into device slots, and offloads what is computed.

    All calls come from the scheduler's thread, or from the forward that it runs. A lookup waits a moment for the
    server, a load ends before its slots are used or freed, offloads are not waited for.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        settings = SGLangSettings.from_extra_config(extra_config or {}, where=_WHERE)
        check_set_up(components, server_args)
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: pool}
        self._page_tokens = int(params.page_size)
        self._rank = _rank_of(params, shared=is_latent(pool))
        self._client = settings.connect()
        try:
            caches = device_caches(pool)
            self._register(caches, server_args, settings)
        except BaseException:
            self._client.close()
            raise
        tokens = next(iter(caches.values()))
        self._device = tokens.device
        self._gate: Any = None
        questions = Questions(
            self._client,
            page_tokens=self._page_tokens,
            pause_s=settings.pause_s,
            answer_timeout_s=settings.answer_timeout_s,
        )
        self._promises = Promises(questions)
        self.layer_done_counter = Loads(
            self._client, questions, num_layers=num_layers(caches), timeout_s=settings.load_timeout_s
        )
        self._offloads = Offloads(
            self._client,
            max_pages=max(1, len(tokens) // self._page_tokens // _OFFLOADED_SHARE),
            timeout_s=settings.load_timeout_s,
            stream=self._written,
        )

    def _register(self, caches: Mapping[str, torch.Tensor], server_args: Any, settings: SGLangSettings) -> None:
        engine_id = f"sglang-{uuid.uuid4().hex}"
        model = model_name(
            server_args,
            self._rank,
            model_id=settings.model_id,
            release=interface.release(),
            engine_id=engine_id,
        )
        try:
            self._client.register_kv_caches(
                caches,
                engine_id=engine_id,
                model=model,
                format="token_pool",
                hints={"tokens_per_block": self._page_tokens},
                chunk_tokens=self._page_tokens,
                policy=IPCPolicy(isolated_ipc=settings.isolated_ipc),
            )
        except (DeadlineError, ServerGoneError) as error:
            _LOG.warning("the cache server at %s does not answer: no KV is kept or found: %s", settings.url, error)

    def lookup(self, rid: str, transfers: Any) -> list[int]:
        """All lengths in pages, from 1 to what is there; it is promised to the request for some seconds."""
        kv = _only_kv(transfers)
        if kv is None or not kv.keys:
            return []
        return list(range(1, self._promises.ask(rid, ChunkKeys.from_hex(kv.keys).data) + 1))

    def load(self, rid: str, transfers: Any) -> bool:
        """Queue a load.

        All ranks have to give the same answer, so that where there are several a promise that is void fails the load
        later, and with it the request; a rank alone refuses it, and the tokens are computed.
        """
        kv = _only_kv(transfers)
        if kv is None or not kv.keys:
            return False
        runs = self._promises.take(rid, ChunkKeys.from_hex(kv.keys).data)
        if runs is None and self._rank.tp_size == self._rank.cp_size == self._rank.pp_size == 1:
            return False
        self.layer_done_counter.queue(rid, QueuedLoad(runs, block_ids(kv.device_indices, self._page_tokens)))
        return True

    def start_layer_wise_loading(self) -> int:
        """Start what is queued; the batch's number, or -1."""
        return self.layer_done_counter.start(self._written)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Whether all of a batch has landed; nothing of it is written any more."""
        return self.layer_done_counter.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        """Take back a load that has not started, and what is promised to the request."""
        self._promises.forget(rid)
        return self.layer_done_counter.cancel(rid)

    def offload(self, transfers: Any, session_id: str | None = None) -> bool:
        """Have pages kept. Always accepted, as all ranks have to agree; what becomes of it is told later."""
        kv = _only_kv(transfers)
        if kv is None or not kv.keys:
            return False
        if self._rank.writes:
            keys = ChunkKeys.from_hex(kv.keys).data
            self._offloads.add(keys, block_ids(kv.device_indices, self._page_tokens))
        else:
            self._offloads.add_done()
        return True

    def num_completed_offloads(self) -> int:
        """How many of the oldest offloads have ended."""
        return self._offloads.num_completed()

    def pop_completed_offload(self) -> bool:
        """How the oldest one ended."""
        return self._offloads.pop_completed()

    def reset(self) -> None:
        """See all transfers through, and forget them."""
        self.layer_done_counter.reset()
        self._offloads.reset()
        self._promises.clear()

    def close(self) -> None:
        """The same, and hang up."""
        self.reset()
        self._client.close()

    def _written(self) -> int | None:
        """A stream whose work is done once all that was computed, and indexed, up to now is; None without a GPU."""
        if self._device.type != "cuda":
            return None
        if self._gate is None:
            self._gate = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for event in self.record_offload_ready():
            self._gate.wait_event(event)
        return int(self._gate.cuda_stream)


def _only_kv(transfers: Any) -> Any:
    """The transfer of keys and values; None where there are others, too, which nobody could restore."""
    found = list(transfers)
    return found[0] if len(found) == 1 and found[0].name == PoolName.KV else None


def _rank_of(params: Any, *, shared: bool) -> RankIdentity:
    rank, size = 0, 1
    group = params.attn_tp_cache_group or params.tp_cache_group
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
    return RankIdentity(
        rank, size, params.pp_rank, params.pp_size, params.attn_cp_rank, params.attn_cp_size, shared=shared
    )
