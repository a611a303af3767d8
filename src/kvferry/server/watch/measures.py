"""What the server's numbers mean: each name once, for Prometheus and for docs/cache-server.md.

A name is that of `stats`, but for families whose members have a label: `misses_evicted` there is `misses` with
reason="evicted" here, `disk_queue` is `tier_queue` with tier="disk".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Measure(NamedTuple):
    """A counter goes up from the start on; a gauge says what is now. `label` is empty where there is none."""

    is_gauge: bool
    label: str
    help: str


def _count(text: str, label: str = "") -> Measure:
    return Measure(False, label, text)


def _gauge(text: str, label: str = "") -> Measure:
    return Measure(True, label, text)


MEASURES: Mapping[str, Measure] = {
    "healthy": _gauge("1 while every thread moves, 0 with the reason in /health and in the log."),
    "sessions": _gauge("Clients that are connected."),
    "sessions_refused": _count("Connections that were refused.", "reason"),
    "sessions_broken": _count("Sessions ended because the client broke the protocol."),
    "sessions_silent": _count("Sessions over TCP ended because no heartbeat came."),
    "registrations": _count("KV caches that were registered."),
    "registrations_refused": _count("KV caches that were not taken.", "reason"),
    "engines": _gauge("Engines of which a rank is registered."),
    "held_bytes": _gauge("Engines' KV caches that are registered or not unmapped yet.", "device"),
    "mapped_bytes": _gauge("Memory of other processes that is mapped here."),
    "lookups": _count("Lookups."),
    "lookups_waiting": _gauge("Lookups that are answered when lower tiers have loaded, or their time is over."),
    "chunks_hits": _count("Chunks that lookups found in memory, of each rank."),
    "chunks_misses": _count("Chunks that lookups asked for and did not find in memory."),
    "misses": _count("Lookups that found less than asked for, by what became of the first chunk missing.", "reason"),
    "leases": _gauge("Promises of lookups that are neither taken nor released."),
    "leases_expired": _count("Promises that nobody took or released in time."),
    "stores": _count("Stores."),
    "stores_failed": _count("Stores of which nothing was kept because the copy failed or was cancelled."),
    "bytes_stored": _count("Bytes copied from engines into memory."),
    "retrieves": _count("Retrieves."),
    "retrieves_failed": _count("Retrieves that filled not all blocks; the engine was told which."),
    "bytes_retrieved": _count("Bytes copied from memory into engines."),
    "chunks": _gauge("Chunks in memory."),
    "chunks_committed": _count("Chunks that were stored whole."),
    "chunks_aborted": _count("Chunks that were begun and dropped."),
    "chunks_evicted": _count("Chunks that made room for others."),
    "chunks_discarded": _count("Chunks that were cleared, or dropped because they cannot be delivered."),
    "chunks_damaged": _count("Chunks in memory that did not match their checksum (with verify-memory)."),
    "chunks_skipped": _count("Chunks that were not stored.", "reason"),
    "memory_wasted_bytes": _gauge("Memory that chunks of the sizes in use cannot fill: what is left over behind them."),
    "fetches": _gauge("Chains that are being loaded from lower tiers."),
    "loads_cut": _count("Chunks that lower tiers have, and that memory had no room for."),
    "writes": _gauge("Chunks on their way to lower tiers."),
    "writes_lost": _count("Chunks that were in no lower tier when the time of drain-s was over at the end."),
    "tier_capacity_bytes": _gauge("What the tier may hold; memory grows to its size while it is pinned.", "tier"),
    "tier_used_bytes": _gauge("What it holds.", "tier"),
    "tier_chunks": _gauge("Chunks in it.", "tier"),
    "tier_evicted": _count("Chunks that made room in it for others.", "tier"),
    "tier_bytes_written": _count("Bytes written to it.", "tier"),
    "tier_bytes_read": _count("Bytes read from it.", "tier"),
    "tier_chunks_written": _count("Chunks written to it.", "tier"),
    "tier_chunks_read": _count("Chunks read from it.", "tier"),
    "tier_writes_failed": _count("Writes that failed; the log says why.", "tier"),
    "tier_writes_full": _count("Writes that it had no room for.", "tier"),
    "tier_writes_skipped": _count("Writes that were left out: it is paused, or too far behind.", "tier"),
    "tier_writes_over_quota": _count(
        "Those of them that were left out as their tenant's quota there is used up.", "tier"
    ),
    "tier_reads_failed": _count("Reads that failed; a miss each.", "tier"),
    "tier_deletes_failed": _count("Deletions that failed, and are tried again; the log says why.", "tier"),
    "tier_corrupt": _count("Chunks that were torn, damaged or not what their name says; a miss each.", "tier"),
    "tier_torn": _count("Files of an earlier run that were no whole chunks, and were removed.", "tier"),
    "tier_unlisted": _gauge("Folders of chunks that the last search could not look into, and left out.", "tier"),
    "tier_missing": _count("Chunks that were gone when they were to be read; a miss each.", "tier"),
    "tier_queue": _gauge("Calls to it that wait or run.", "tier"),
    "tier_backlog_bytes": _gauge("Bytes that wait to be written to it.", "tier"),
    "tier_deleting": _gauge("Deletions of it that are going on.", "tier"),
    "tier_scanning": _gauge("1 while the chunks of an earlier run are being found.", "tier"),
    "tier_paused": _gauge("1 while it is left alone after failures.", "tier"),
}
