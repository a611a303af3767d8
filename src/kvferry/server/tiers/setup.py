"""Which lower tiers this server has: a choice made once, before any thread starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.cache import ChunkIndex, Pool
from kvferry.cache.tiers.disk import DiskTier
from kvferry.cache.tiers.remote import RemoteTier
from kvferry.config import ServerConfig
from kvferry.server.tiers.lower_tiers import LowerTiers
from kvferry.server.tiers.room import TierLimits
from kvferry.server.tiers.tasks import TierCompletion
from kvferry.server.tiers.threads import TierThreads

if TYPE_CHECKING:
    from kvferry.cache.tiers import Tier


def make_tiers(
    config: ServerConfig,
    index: ChunkIndex,
    *,
    pool: Pool,
    memory_address: int,
    post: Callable[[TierCompletion], None],
    undo: contextlib.ExitStack,
) -> LowerTiers:
    """The tiers that `config` names, not started yet; `undo` closes them.

    Raises TierError where one cannot be had: the disk is another server's, the URL is of no known kind.
    """

    def threads(tier: Tier) -> TierThreads:
        undo.callback(tier.close)
        return TierThreads(tier, memory_address=memory_address, post=post)

    options = config.remote_options
    return LowerTiers(
        index,
        pool,
        disk=None if config.disk_path is None else threads(DiskTier(config.disk_path)),
        limits=TierLimits(config.disk_bytes or 0, config.tenant_disk_quotas, config.tenant_remote_quotas),
        remote=None if config.remote_url is None else threads(RemoteTier(config.remote_url, options=options)),
        write_back=config.write_policy == "write-back",
    )
