"""One thread's load on the cache: look up, retrieve and verify, fill, store; and what must never be, written down."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.client import CacheClient
from kvferry.errors import DeadlineError, KVFerryError, RequestError
from kvferry.layout import HASH_BYTES, chain_hashes
from soak.blocks import Blocks
from soak.board import Journal, Row
from soak.content import Content, PagedBytes

CHUNK_TOKENS = 64
JOB_S = 20.0
_TRUNKS, _BRANCHES = 6, 8
_CUT_OFF_PAUSE_S = 0.02
_REST_S = 0.002
_MAX_LEFT = 4

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Habits:
    """How long prompts are at most, and how often, of 1, a turn does something unusual."""

    max_chunks: int = 16
    cancel: float = 0.05
    leave_lease: float = 0.1
    clear: float = 0.01
    wait: float = 0.2
    store_nothing: float = 0.1
    skip: float = 0.25


@dataclass(frozen=True)
class Share:
    """What one thread of an engine has to itself, and what it shares with the others."""

    client: CacheClient
    memory: PagedBytes
    content: Content
    blocks: Sequence[int]
    row: Row
    journal: Journal
    dice: random.Random


class Worker(threading.Thread):
    """Runs the load of one share until `stop`; rests between two turns while `paused` is set.

    This thread alone touches the share's blocks and its row. `stop`, `resting` and `leases_left` are for others.
    """

    def __init__(self, name: str, share: Share, habits: Habits, paused: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self._client, self._content, self._memory = share.client, share.content, share.memory
        self._row, self._journal, self._dice = share.row, share.journal, share.dice
        self._blocks = Blocks(share.memory, share.blocks, row=share.row, journal=share.journal, dice=share.dice)
        self._habits, self._paused = habits, paused
        self._stopping = threading.Event()
        self._number = 0
        self.resting = threading.Event()
        self.leases_left: list[int] = []  # may be taken while this thread rests

    def stop(self, timeout_s: float = 30.0) -> bool:
        """End after this turn; whether it did in time."""
        self._stopping.set()
        self.join(timeout_s)
        return not self.is_alive()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._paused.is_set():
                    self._row.at("idle")
                    self._blocks.check(all_of_them=True)
                    self.resting.set()
                    self._stopping.wait(_REST_S)
                else:
                    self.resting.clear()
                    self._turn()
        except Exception:  # noqa: BLE001 - whatever it is, nobody else would see it
            self._journal.violation("the load failed", thread=self.name, trace=traceback.format_exc())
        finally:
            self._row.at("end")
            self.resting.set()

    def _turn(self) -> None:
        self._row.add("turns")
        self._number += 1
        tokens = self._prompt()
        keys = chain_hashes(tokens, CHUNK_TOKENS)
        blocks = self._blocks.take(len(keys) // HASH_BYTES * self._content.blocks_a_chunk)
        if self._dice.random() < self._habits.clear:
            self._clear(tokens)
        failed = self._look_up_and_retrieve(tokens, keys, blocks)
        if not failed and self._dice.random() >= self._habits.store_nothing:
            self._store(tokens, keys, blocks)
        self._client.end_request(self._request)
        self._blocks.give_back([block for block in blocks if block not in failed])
        self._blocks.check()
        if not self._client.connected:
            self._stopping.wait(_CUT_OFF_PAUSE_S)  # computing a prompt would take longer

    @property
    def _request(self) -> str:
        return f"{self.name}-{self._number}"

    def _prompt(self) -> Tokens:
        """A prompt of any length out of a tree of trunks and branches, the first ones more often."""
        trunk = int(_TRUNKS * self._dice.random() ** 2)
        branch = int(_BRANCHES * self._dice.random() ** 2)
        longest = self._habits.max_chunks * CHUNK_TOKENS
        shared = self._dice.choice((0, 3, 8)) * CHUNK_TOKENS
        total = self._dice.randint(1, longest)
        head = np.random.default_rng((1, trunk)).integers(0, 50_000, longest, dtype=np.int32)
        tail = np.random.default_rng((2, branch)).integers(0, 50_000, longest, dtype=np.int32)
        return np.concatenate((head[:shared], tail))[:total]

    def _look_up_and_retrieve(self, tokens: Tokens, keys: bytes, blocks: list[int]) -> set[int]:
        """The blocks that a failed retrieve has not filled, and that are used for something else now."""
        self._row.at("lookup")
        wait_s = 0.05 if self._dice.random() < self._habits.wait else 0.0
        try:
            found = self._client.lookup(self._request, tokens, wait_s=wait_s)
        except KVFerryError as error:
            self._error("lookup", error)
            return set()
        self._row.add("lookups")
        self._row.add("tokens_asked", len(tokens))
        self._row.add("tokens_found", found.tokens)
        self._row.add("hits" if found.tokens else "misses" if self._client.connected else "misses_cut_off")
        if found.tokens % CHUNK_TOKENS or found.tokens > len(tokens) or bool(found.tokens) != bool(found.lease_id):
            self._journal.violation("a lookup's answer makes no sense", answer=repr(found), asked=len(tokens))
        if not found.tokens:
            return set()
        if self._dice.random() < self._habits.leave_lease:
            self._row.add("leases_left")  # until some later turn, or until the server sees us die
            self.leases_left.append(found.lease_id)
            if len(self.leases_left) > _MAX_LEFT:
                self._release(self.leases_left.pop(0))
            return set()
        failed = self._retrieve(found.lease_id, keys[: found.tokens // CHUNK_TOKENS * HASH_BYTES], blocks)
        self._release(found.lease_id)
        return failed

    def _release(self, lease_id: int) -> None:
        self._row.at("release")
        try:
            self._client.release(lease_id)
        except KVFerryError as error:
            self._error("release", error)

    def _retrieve(self, lease_id: int, keys: bytes, blocks: list[int]) -> set[int]:
        """Have the promised blocks filled; verify them, and that no others were touched. Those that were not filled."""
        promised = len(keys) // HASH_BYTES * self._content.blocks_a_chunk
        skip = self._dice.randrange(promised) if self._dice.random() < self._habits.skip else 0
        poison = self._blocks.poison(blocks)
        self._row.at("retrieve")
        self._row.add("retrieves")
        asked_at = time.monotonic()
        skip_tokens = skip * CHUNK_TOKENS // self._content.blocks_a_chunk
        try:
            job = self._client.retrieve(lease_id, blocks, skip_tokens, timeout_s=JOB_S)
        except KVFerryError as error:
            failed, why = blocks[skip:promised], self._error("retrieve", error)
        else:
            why = self._wait(job, "retrieve", asked_at)
            failed = list(job.failed_block_ids)
            if bool(failed) != bool(why):
                self._journal.violation("a retrieve's failed blocks and its error disagree", error=why, failed=failed)
        others = "a retrieve wrote to a block that it was to leave alone"
        self._blocks.expect_untouched(blocks[:skip] + blocks[promised:], poison, others)
        if why:
            self._row.add("retrieves_failed")
            self._blocks.use_elsewhere(failed, why)
        else:
            self._row.note_now("served_at")
            self._row.note_now("hit_at")
        self._verify(keys, blocks, set(blocks[skip:promised]) - set(failed))
        return set(failed)

    def _verify(self, keys: bytes, blocks: list[int], filled: set[int]) -> None:
        """Compare every filled block with what its chunk's key says."""
        size = self._content.blocks_a_chunk
        for chunk in range(len(keys) // HASH_BYTES):
            mine = blocks[chunk * size : (chunk + 1) * size]
            key = keys[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]
            held = self._memory.read(mine)
            for wrong in self._content.differences(key, held, [block in filled for block in mine]):
                block = mine[wrong["nth"]]
                self._journal.violation("wrong bytes", key=key.hex(), chunk=chunk, block=block, **wrong)
            self._row.add("bytes_verified", held.nbytes // size * sum(block in filled for block in mine))

    def _store(self, tokens: Tokens, keys: bytes, blocks: list[int]) -> None:
        """Write the prompt's KV, as a forward pass would, and have it stored."""
        self._row.at("fill")
        size, count = self._content.blocks_a_chunk, len(keys) // HASH_BYTES
        for chunk in range(count):
            key = keys[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]
            self._memory.write(blocks[chunk * size : (chunk + 1) * size], self._content.chunk(key))
        self._row.at("store")
        self._row.add("stores")
        asked_at = time.monotonic()
        try:
            job = self._client.store(tokens, blocks, request_id=self._request, timeout_s=JOB_S)
        except KVFerryError as error:
            self._error("store", error)
            return
        if self._wait(job, "store", asked_at):
            self._row.add("stores_failed")
            return
        done = job.wait(0)
        for name in ("stored", "present", "skipped"):
            self._row.add(f"chunks_{name}", getattr(done, f"num_{name}"))
        if done.num_stored + done.num_present + done.num_skipped != count:
            self._journal.violation("a store does not account for all chunks", result=repr(done), chunks=count)
        self._row.note_now("served_at")

    def _wait(self, job: Any, what: str, asked_at: float) -> str:
        """Wait for a job's end, or stop it on its way. Why it failed; empty where it went well."""
        try:
            if self._dice.random() < self._habits.cancel:
                time.sleep(self._dice.random() ** 2 * 0.002)
                self._row.at("cancel")
                self._row.add("cancels")
                job.cancel(JOB_S)
            else:
                job.wait(JOB_S + 5)
        except DeadlineError:
            if not job.done():
                self._journal.violation("a job does not end", job=repr(job), after_s=time.monotonic() - asked_at)
                raise
        except KVFerryError:
            pass  # the job tells it, too
        error = job.error
        if error is None:
            return ""
        if isinstance(error, RequestError) and error.code == "cancelled" and self._row.point == "cancel":
            return str(error)
        return self._error(what, error, asked_at=asked_at)

    def _clear(self, tokens: Tokens) -> None:
        self._row.at("clear")
        self._row.add("clears")
        try:
            self._client.clear(tokens)
        except KVFerryError as error:
            self._error("clear", error)

    def _error(self, what: str, error: KVFerryError, asked_at: float | None = None) -> str:
        """Note what may be only while the server is gone."""
        text = f"{type(error).__name__}: {error}"
        code = error.code if isinstance(error, RequestError) else type(error).__name__
        self._journal.error(what, error=text, code=code, asked_at=asked_at)
        return text
