"""Decides, before every step, which tokens are computed next. Knows token ids and blocks, never tensors.

Iteration-level scheduling (Orca; PagedAttention, section 4.5): the batch is formed anew for each
step within one token budget. First the running sequences' next tokens, then chunks of prompts,
then waiting requests in the order of their arrival. When blocks run out the latest arrival gives
all of its blocks back and is computed again later.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from localpaged.engine.kv_cache_manager import BlockCopy, KVCacheManager, Start
from localpaged.engine.sequence import Phase, Request, Sequence
from localpaged.errors import PromptTooLongError


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next num_tokens tokens of one sequence. samples: whether the logits after them are wanted."""

    sequence: Sequence
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class Step:
    """What one forward pass computes: decode rows (one token each), then prefill chunks."""

    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class Scheduler:
    """Requests in and steps out. max_num_batched_tokens is the budget of one step."""

    def __init__(
        self,
        manager: KVCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"a step of {max_num_batched_tokens} tokens cannot hold {max_num_seqs} sequences")
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.admitted: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def tables(self) -> Iterable[list[int]]:
        """Every block table that holds references, for the pool's check()."""
        for request in (*self.waiting, *self.running):
            for sequence in request.sequences:
                yield sequence.block_table
        yield from self.manager.leases.tables()

    def num_blocks_at_most(self, num_prompt_tokens: int, max_tokens: int, num_sequences: int) -> int:
        """The most blocks that a request can come to hold: its prompt's full blocks once, the rest per sequence."""
        shared = num_prompt_tokens // self.manager.block_size
        # The last token drawn is never computed.
        total = self.manager.num_blocks_for(num_prompt_tokens + max_tokens - 1)
        return shared + (total - shared) * num_sequences

    def fit_max_tokens(self, num_prompt_tokens: int, max_tokens: int | None, num_sequences: int) -> int:
        """How many tokens each answer may have, of the max_tokens asked for (None: as many as there is room).

        Raises PromptTooLongError, with the numbers, for what could never run.
        """
        if num_sequences > self.max_num_seqs:
            raise PromptTooLongError(
                f"{num_sequences} candidates were asked for and the engine runs {self.max_num_seqs} at once. "
                f"Ask for fewer, or start with --max-num-seqs {num_sequences}.",
                "n",
            )
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            raise PromptTooLongError(
                f"The prompt has {num_prompt_tokens:,} tokens and the model's window is {self.max_model_len:,}. "
                "Shorten it or start a new conversation.",
                "messages",
            )
        wanted = room if max_tokens is None else min(max_tokens, room)
        pool = self.manager.pool
        if self.num_blocks_at_most(num_prompt_tokens, wanted, num_sequences) <= pool.num_blocks:
            return wanted
        shared = num_prompt_tokens // pool.block_size
        own = (pool.num_blocks - shared) // num_sequences
        fits = (shared + own) * pool.block_size - num_prompt_tokens + 1
        if fits < 1 or max_tokens is not None:
            raise PromptTooLongError(
                f"A prompt of {num_prompt_tokens:,} tokens with {num_sequences} answers of up to {wanted:,} "
                f"tokens needs {self.num_blocks_at_most(num_prompt_tokens, wanted, num_sequences):,} blocks and "
                f"the pool has {pool.num_blocks:,} of {pool.block_size} tokens. "
                + (f"Ask for at most {fits:,} tokens" if fits >= 1 else "Shorten the prompt")
                + ", for fewer answers, or start with more --kv-cache-memory.",
                "max_tokens" if fits >= 1 else "messages",
            )
        return min(fits, wanted)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def cancel(self, request: Request, index: int | None = None) -> list[Sequence]:
        """End a request, or one of its candidates; returns those that ended by it. Blocks return at once."""
        ended = [sequence for sequence in request.live if index is None or sequence.index == index]
        for sequence in ended:
            self.finish(sequence, "cancelled")
        self.retire(request)
        return ended

    def finish(self, sequence: Sequence, reason: str, stop_reason: str | int | None = None) -> None:
        """End one candidate and take its blocks back. retire() its request afterwards."""
        request = sequence.request
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if request.phase is Phase.PREFILL and sequence.block_table and request.live:
            # It was computing the prompt for all of them: the next one goes on where it is.
            self.manager.move(sequence, request.leader)
        self.manager.end(sequence)

    def retire(self, request: Request) -> bool:
        """Drop a request whose candidates have all ended; returns whether it was one."""
        if request.live:
            return False
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request.phase is not Phase.FINISHED:
            self.running.remove(request)
        request.phase = Phase.FINISHED
        return True

    def schedule(self) -> Step:
        """Choose the next step's tokens and give them blocks. An empty step means there is no work."""
        step = Step()
        self.admitted = []
        preempted = self._schedule_running(step)
        if not preempted:
            self._schedule_waiting(step)
        return step

    def likely_next(self) -> list[Sequence]:
        """The rows of the next step if every candidate goes on; empty when more is to be done than one token each."""
        if self.waiting or any(r.phase is not Phase.DECODE or r.params.beam_width is not None for r in self.running):
            return []
        rows = [sequence for request in self.running for sequence in request.live]
        return rows if all(sequence.num_uncomputed == 0 for sequence in rows) else []

    def commit(self, step: Step) -> None:
        """Note that a step has run: its tokens have KV, and finished prompts fork into their candidates."""
        for chunk in step.chunks:
            self.manager.commit(chunk.sequence, chunk.num_tokens)
        for chunk in step.prefills:
            request = chunk.sequence.request
            if request.phase is Phase.PREFILL and chunk.sequence.num_computed == request.num_prompt_tokens:
                request.phase = Phase.DECODE
                for sequence in request.live:
                    if sequence is not chunk.sequence:
                        self.manager.fork(chunk.sequence, sequence)

    def _schedule_running(self, step: Step) -> bool:
        """Schedule requests that hold blocks, oldest first; returns whether one had to be preempted."""
        scheduled: dict[str, tuple[list[Chunk], list[BlockCopy]]] = {}
        # Rows that decode come before chunks of prompts in the budget, so that a long prompt delays nobody.
        num_decodes = sum(
            sequence.num_uncomputed == 1
            for request in self.running
            if request.phase is Phase.DECODE
            for sequence in request.live
        )
        prefill_budget = self.max_num_batched_tokens - num_decodes
        preempted = False
        for request in list(self.running):
            if request.phase is Phase.WAITING:
                continue
            chunks: list[Chunk] = []
            copies: list[BlockCopy] = []
            scheduled[request.request_id] = (chunks, copies)
            for sequence in [request.leader] if request.phase is Phase.PREFILL else request.live:
                chunk = self._next_chunk(sequence, prefill_budget)
                if chunk is None:
                    continue
                while (made := self.manager.allocate(sequence, chunk.num_tokens)) is None:
                    preempted = True
                    victim = self.running[-1]
                    self._preempt(victim)
                    scheduled.pop(victim.request_id, None)
                    if victim is request:
                        break
                if made is None:
                    break
                if not self._decodes(chunk):
                    prefill_budget -= chunk.num_tokens
                chunks.append(chunk)
                copies += made
        for chunks, copies in scheduled.values():
            for chunk in chunks:
                (step.decodes if self._decodes(chunk) else step.prefills).append(chunk)
            step.copies += copies
        return preempted

    def _schedule_waiting(self, step: Step) -> None:
        num_running = sum(len(request.live) for request in self.running)
        budget = self.max_num_batched_tokens - step.num_tokens
        while self.waiting and budget > 0:
            request = self.waiting[0]
            if request.held or num_running + len(request.live) > self.max_num_seqs:
                break
            sequence = request.leader
            start = Start([], 0, 0)
            if not request.reads_every_row:
                start = self.manager.find_start(request.prompt_token_ids, request.conversation)
            if not self._fits_now(request, start):
                break
            self.waiting.popleft()
            self.manager.adopt(sequence, start)
            request.phase = Phase.PREFILL
            if request.num_cached_tokens is None:
                request.num_cached_tokens = sequence.num_computed
            self.running.append(request)
            self.admitted.append(request)
            num_running += len(request.live)
            chunk = self._next_chunk(sequence, budget)
            assert chunk is not None
            copies = self.manager.allocate(sequence, chunk.num_tokens)
            assert copies is not None, "_fits_now() was wrong"
            budget -= chunk.num_tokens
            step.prefills.append(chunk)
            step.copies += copies

    def _fits_now(self, request: Request, start: Start) -> bool:
        """Whether the whole prompt and a first block for each candidate are there, so that admission is not undone."""
        pool, leases = self.manager.pool, self.manager.leases
        longest = max(len(sequence.token_ids) for sequence in request.live)
        needed = self.num_blocks_at_most(
            request.num_prompt_tokens, longest - request.num_prompt_tokens + 1, len(request.live)
        )
        whole = start.blocks[: start.num_tokens // pool.block_size]
        missing = needed - len(whole)
        # What it starts from is no longer there to be taken.
        taken_from_cache = sum(pool.reference_count(block) == 0 for block in start.blocks)
        if missing + taken_from_cache <= pool.num_available:
            return True
        return missing + taken_from_cache <= pool.num_available + leases.num_reclaimable(besides=start.blocks)

    def _next_chunk(self, sequence: Sequence, prefill_budget: int) -> Chunk | None:
        """The sequence's next tokens within the budget; None when there is no budget left for them."""
        request = sequence.request
        if request.phase is Phase.PREFILL:
            # Up to the end of the prompt, where the candidates part.
            missing = request.num_prompt_tokens - sequence.num_computed
            num_tokens = min(missing, prefill_budget)
            samples = num_tokens == missing and request.live[0].num_generated == 0 and not request.embeds
            return Chunk(sequence, num_tokens, samples) if num_tokens > 0 else None
        missing = sequence.num_uncomputed
        if missing == 1:
            return Chunk(sequence, 1, True)
        num_tokens = min(missing, prefill_budget)
        return Chunk(sequence, num_tokens, num_tokens == missing) if num_tokens > 0 else None

    @staticmethod
    def _decodes(chunk: Chunk) -> bool:
        return chunk.sequence.num_uncomputed == 1 and chunk.sequence.request.phase is Phase.DECODE

    def _preempt(self, request: Request) -> None:
        """Take all blocks of a request back; it waits at the front and is computed again from its tokens."""
        for sequence in request.sequences:
            self.manager.release(sequence)
        request.phase = Phase.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.running.remove(request)
        self.waiting.appendleft(request)
