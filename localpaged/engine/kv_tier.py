"""Moves leases between the pool and what is below it, host memory and disk, beside the engine's steps.

What a conversation goes on from is written to disk as soon as it is chosen, so that a killed process loses nothing
but time. A lease that gives way moves down: to host memory where there is room set aside, and to disk. It is read
again when the conversation is opened or asked, where reading is faster than computing by the rates measured so far.
Spans are read and written on threads of their own; blocks are copied between steps.
"""

import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

from localpaged.engine.kv_cache_manager import KVCacheManager
from localpaged.engine.kv_spans import KV, ArrivingKV, Found, KvReadError, SpanStore, find
from localpaged.engine.leases import Lease
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.sequence import Request

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 3.0
# Copies of blocks that wait to be written; beyond it, what gives way is let go.
MOST_QUEUED_BYTES = 1 << 29


class Blocks(Protocol):
    """The memory that blocks are in."""

    def read_blocks(self, blocks: list[int]) -> KV | ArrivingKV: ...

    def write_blocks(self, blocks: list[int], kv: KV) -> None: ...


@dataclass(slots=True, eq=False)
class Load:
    """KV on its way in, from first_block on. request: the one that waits for it, if there is one."""

    token_ids: list[int]
    lease_id: str
    first_block: int
    conversation: str
    parts: "Future[list[KV]]"
    request: Request | None


class KvTier:
    """Leases of one pool in further stores, either of which may be absent; they give what they have in this order.

    prefill_tokens_s gives the measured rate of computing.
    """

    def __init__(
        self,
        host: SpanStore | None,
        disk: SpanStore | None,
        manager: KVCacheManager,
        memory: Blocks,
        prefill_tokens_s: Callable[[], float],
    ) -> None:
        self.host = host
        self.disk = disk
        self.stores = [store for store in (host, disk) if store is not None]
        self._manager = manager
        self._memory = memory
        self._prefill_tokens_s = prefill_tokens_s
        # Who waits for what is read does not wait for what is written.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-read")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-write")
        self._loads: list[Load] = []
        # What is being written, in bytes.
        self._writes: dict[Future[Any], int] = {}
        self._ids = itertools.count()
        self.num_loaded_tokens = 0

    @property
    def loading(self) -> bool:
        return bool(self._loads)

    def save(self, lease: Lease) -> None:
        """Write what of a lease is not on disk."""
        if self.disk is not None:
            self._save(lease, self.disk)

    def move_down(self, lease: Lease) -> None:
        """Keep what of a lease is nowhere but in the pool, before its blocks are given to others."""
        for store in self.stores:
            if store is self.host or sum(list(self._writes.values())) < MOST_QUEUED_BYTES:
                self._save(lease, store)

    def _save(self, lease: Lease, store: SpanStore) -> None:
        token_ids = lease.token_ids[: lease.num_computed]
        block_size = self._manager.block_size
        num_stored = store.num_stored(token_ids)
        if num_stored == len(token_ids):
            return
        # What other answers to the same question have in common with this one is a span of its own.
        whole = lease.num_shared_tokens // block_size * block_size
        edges = [num_stored, *([whole] if num_stored < whole < len(token_ids) else []), len(token_ids)]
        for start, end in itertools.pairwise(edges):
            first, last = start // block_size, -(-end // block_size)
            kv = self._memory.read_blocks(lease.block_table[first:last])
            if store is self.host:
                store.write(kv, token_ids[:end], start, lease.conversation, lease.id)
                continue
            write = self._writer.submit(store.write, kv, token_ids[:end], start, lease.conversation, lease.id)
            self._await(write, kv.nbytes)

    def begin_load(self, token_ids: list[int], conversation: str, request: Request | None) -> bool:
        """Start reading what the stores have of a text and the pool has not, where that pays; whether it does."""
        found = self._worthwhile(token_ids, self._manager.find_start(token_ids, conversation).num_tokens)
        if found is None:
            return False
        for load in self._loads:
            if load.conversation == conversation and load.request is None:
                # Opened a moment ago: the request waits for what is being read already.
                load.request = request
                return True
        last = found.parts[-1].span
        # What is deleted with an answer is found by the answer's name.
        lease_id = last.lease_id if last.conversation == conversation else ""
        if not lease_id or self._manager.leases.get(lease_id) is not None:
            lease_id = f"read:{next(self._ids)}"
        parts = self._reader.submit(self._read, found)
        self._loads.append(
            Load(token_ids[: found.num_tokens], lease_id, found.first_block, conversation, parts, request)
        )
        return True

    def price(self, token_ids: list[int], num_in_memory: int) -> tuple[int, float]:
        """How many further tokens of a text would be read, and the seconds that this would take."""
        found = self._worthwhile(token_ids, num_in_memory)
        if found is None:
            return 0, 0.0
        num_tokens = min(found.num_tokens, len(token_ids) - 1)
        return num_tokens - num_in_memory, found.seconds()

    def _worthwhile(self, token_ids: list[int], num_in_memory: int) -> Found | None:
        """What the stores have of a text, when reading it is faster than computing what the pool has not."""
        found = find(self.stores, token_ids)
        gained = min(found.num_tokens, len(token_ids) - 1) - num_in_memory
        if gained < self._manager.block_size:
            return None
        # The block in which the pool's part ends is read too: it is written to.
        found.leave_out(num_in_memory // self._manager.block_size)
        return found if found.seconds() < gained / self._prefill_tokens_s() else None

    def _read(self, found: Found) -> list[KV]:
        parts: list[KV] = []
        for part in found.parts:
            start = time.perf_counter()
            try:
                parts.append(part.store.read(part.span, part.first, part.end))
            except KvReadError:
                break  # What came before it is as good as ever.
            rate = part.span.num_bytes / max(time.perf_counter() - start, 1e-6)
            part.store.read_bytes_s += 0.3 * (rate - part.store.read_bytes_s)
        return parts

    def install(self, wait_s: float) -> list[Request]:
        """Put what has been read into the pool; the requests that waited for it."""
        if self._loads and wait_s:
            wait([load.parts for load in self._loads], timeout=wait_s, return_when="FIRST_COMPLETED")
        done = [load for load in self._loads if load.parts.done()]
        self._loads = [load for load in self._loads if load not in done]
        for load in done:
            if (error := load.parts.exception()) is not None:
                logger.error("KV could not be read and is computed again: %r", error)
            else:
                self._install(load)
        return [load.request for load in done if load.request is not None]

    def drop(self, conversation: str | None) -> None:
        """Forget a conversation, or all of them: its spans, and what is on its way in."""
        for load in self._loads:
            if conversation in (None, load.conversation):
                load.token_ids = []
        self._drop(lambda store: store.drop_conversation(conversation))

    def drop_leases(self, lease_ids: list[str]) -> None:
        """Forget what some answers alone need."""
        for load in self._loads:
            if load.lease_id in lease_ids:
                load.token_ids = []
        self._drop(lambda store: store.drop_leases(lease_ids))

    def _drop(self, drop: Callable[[SpanStore], None]) -> None:
        for store in self.stores:
            drop(store)
        if self.disk is not None and self._writes:
            # Once more for what is being written.
            self._await(self._writer.submit(drop, self.disk), 0)

    def _await(self, write: "Future[Any]", num_bytes: int) -> None:
        """Count a write, or a drop after one, among what is waited for at the end."""
        self._writes[write] = num_bytes
        write.add_done_callback(self._writes.pop)

    def cancel(self, request: Request) -> None:
        """Let nobody wait for a request's load."""
        for load in self._loads:
            if load.request is request:
                load.request = None

    def _install(self, load: Load) -> None:
        manager, block_size = self._manager, self._manager.block_size
        parts = load.parts.result()
        if not parts or not load.token_ids:
            return
        num_blocks = load.first_block + sum(map(len, parts))
        num_tokens = min(len(load.token_ids), num_blocks * block_size)
        request = Request(load.lease_id, load.token_ids[:num_tokens], SamplingParams(), 0, 1)
        request.conversation, request.lease_ids = load.conversation, [load.lease_id]
        sequence = request.sequences[0]
        # Whole blocks that are in the pool stay where they are.
        manager.adopt(
            sequence, manager.find_start(request.prompt_token_ids, load.conversation).whole_blocks(block_size)
        )
        first, missing = len(sequence.block_table), num_tokens - sequence.num_computed
        room = manager.pool.num_available + manager.leases.num_reclaimable()
        # What was in the pool when reading began may have had to go since.
        if first < load.first_block or missing <= 0 or manager.num_missing_blocks(sequence, missing) > room:
            manager.release(sequence)
            return
        manager.allocate(sequence, missing)
        place = load.first_block
        for part in parts:
            begin, end = max(first, place), min(place + len(part), len(sequence.block_table))
            if begin < end:
                self._memory.write_blocks(sequence.block_table[begin:end], part[begin - place : end - place])
            place += len(part)
        self.num_loaded_tokens += missing
        manager.commit(sequence, missing)
        lease = manager.leases.keep(sequence, load.lease_id, load.conversation)
        lease.chosen, lease.on_probation = True, False

    def flush_writes(self) -> None:
        """Wait a little for what is being written."""
        wait(list(self._writes), timeout=FLUSH_TIMEOUT_S)

    def flush(self) -> None:
        """Finish what is being written, if it takes no longer than a little, and end."""
        self.flush_writes()
        for thread in (self._reader, self._writer):
            thread.shutdown(wait=False, cancel_futures=True)
