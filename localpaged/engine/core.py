"""The engine: requests in, one step at a time, events out. Runs in whatever process it is put.

Brings scheduler, runner, sampler and detokenizer together; each is tested on its own.
"""

import logging
import os
import time
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from localpaged.engine.admission import make_request
from localpaged.engine.beam_search import BeamSearch
from localpaged.engine.block_pool import BlockPool
from localpaged.engine.detokenizer import Detokenizer
from localpaged.engine.engine_stats import engine_stats
from localpaged.engine.guide import Guides
from localpaged.engine.job import Candidate, Job
from localpaged.engine.kv_cache_manager import KVCacheManager
from localpaged.engine.leases import Leases
from localpaged.engine.messages import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    Generate,
    Prefilled,
)
from localpaged.engine.rates import Rates
from localpaged.engine.runner import Runner
from localpaged.engine.sampler import HostSampler, Sample, Sampler, position_logprobs
from localpaged.engine.scheduler import Chunk, Scheduler, Step
from localpaged.engine.sequence import Phase, Request, Sequence
from localpaged.engine.sessions import Sessions
from localpaged.errors import InvalidRequestError, LocalpagedError

logger = logging.getLogger(__name__)

LOGITS_ROWS = 64
CONTEXT_TOKENS = 8  # tell how the next one reads: whether a space is before it


class EngineCore:
    """One model over one pool of blocks. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        decode: Callable[[list[int]], str],
        eos_token_ids: frozenset[int],
        vocab_size: int,
        check_when_idle: bool = False,
        sampler: Sampler | None = None,
        guides: Guides | None = None,
    ) -> None:
        self.runner = runner
        self.sampler: Sampler = sampler or HostSampler()
        self.guides = guides
        self.scheduler = scheduler
        self.manager: KVCacheManager = scheduler.manager
        self.pool: BlockPool = scheduler.manager.pool
        self.leases: Leases = scheduler.manager.leases
        self.decode = decode
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self.check_when_idle = check_when_idle
        self.rates = Rates()
        self.sessions = Sessions(scheduler, self.rates)
        self.jobs: dict[str, Job] = {}
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.busy_s = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.sessions.loading

    def submit(self, command: Generate) -> list[Event]:
        """Take a request; events tell of one that is refused."""
        try:
            self._admit(command)
        except LocalpagedError as error:
            return [
                Failed(
                    request_id=command.request_id,
                    code=error.code,
                    message=str(error),
                    param=getattr(error, "param", None),
                )
            ]
        return []

    def cancel(self, request_id: str, index: int | None = None) -> list[Event]:
        """End a request or one candidate of it; every block of what ended is back when this returns."""
        job = self.jobs.get(request_id)
        if job is None:
            return []
        events: list[Event] = []
        ranked = job.request.params.needs_ranking
        live = [s for s in job.request.live if index is None or s.index == index or ranked]
        deltas = [job.delta(self.pool, sequence) for sequence in live]
        self.scheduler.cancel(job.request, None if ranked else index)
        self.sessions.cancelled(job.request)
        for sequence, delta in zip(live, deltas, strict=True):
            if sequence.index < job.request.params.n:
                delta.finish_reason = "cancelled"
                delta.text += job.candidates[sequence.index].detokenizer.finish()
                events.append(delta)
        return events + self._close_if_done(job)

    def step(self) -> list[Event]:
        """Run one step of the model. A step that fails ends the requests in it, and only those."""
        self.sessions.install()
        start = time.perf_counter()
        step = self.scheduler.schedule()
        events: list[Event] = [self._tell_admitted(request) for request in self.scheduler.admitted]
        if step.chunks:
            try:
                events += self._run(step)
            # Whatever the model or a kernel raises must not take the other conversations with it.
            except Exception as error:
                logger.exception("A step failed")
                # A device that is lost is lost to this process: what this raises ends it, and another is started.
                self.runner.wait()
                events += self._fail(step, error)
        elapsed = time.perf_counter() - start
        self.num_steps += 1
        self.busy_s += elapsed
        self.rates.observe(len(step.decodes), step.num_tokens - len(step.decodes), elapsed)
        self.sessions.save_fresh()
        if self.check_when_idle and not self.has_work:
            self.check()
        return events

    def check(self) -> None:
        """Prove that no block is lost or counted wrongly. Raises AssertionError."""
        self.pool.check(list(self.scheduler.tables()))

    def stats(self) -> dict[str, int | float | str | bool]:
        """The pool's audit and the counters since the start; see engine_stats.py."""
        return engine_stats(self)

    def _admit(self, command: Generate) -> None:
        if command.request_id in self.jobs:
            raise InvalidRequestError(f"A request {command.request_id!r} is running already.", "request_id")
        params = command.params
        request = make_request(command, self.scheduler, self.eos_token_ids, self.vocab_size)
        before = command.prompt_token_ids[-CONTEXT_TOKENS:] if command.goes_on else []
        candidates = [
            Candidate(Detokenizer(self.decode, params.stop, params.include_stop_str_in_output, before))
            for _ in request.sequences
        ]
        if params.structured_outputs is not None:
            assert self.guides is not None
            guide = self.guides.start(params.structured_outputs)
            for sequence in request.sequences:
                sequence.guide = guide.copy()
        beams = BeamSearch(request) if params.beam_width is not None else None
        self.jobs[command.request_id] = Job(request, candidates, beams)
        self.sessions.begin_load(request)
        self.scheduler.submit(request)

    def _tell_admitted(self, request: Request) -> Admitted:
        if request.num_preemptions == 0:
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += request.num_cached_tokens or 0
        return Admitted(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
        )

    def _run(self, step: Step) -> list[Event]:
        every_row = any(chunk.sequence.request.reads_every_row for chunk in step.prefills)
        hidden = self.runner.forward(step, every_row)
        sizes = [chunk.num_tokens if every_row else 1 for chunk in step.chunks]
        ends = list(accumulate(sizes))
        events: list[Event] = []
        for chunk, end, size in zip(step.chunks, ends, sizes, strict=True):
            if chunk.sequence.request.phase is Phase.PREFILL:
                events.append(self._tell_prefilled(chunk, hidden[end - size : end]))
        self.scheduler.commit(step)
        for chunk in step.prefills:
            if chunk.sequence.request.embeds and chunk.sequence.request.phase is Phase.DECODE:
                events += self._end_embedding(self.jobs[chunk.sequence.request.request_id])
        rows: list[int] = []
        sequences: list[Sequence] = []
        for chunk, end in zip(step.chunks, ends, strict=True):
            if not chunk.samples:
                continue
            request = chunk.sequence.request
            # The first token: one row of logits, from which every candidate draws its own.
            first = chunk.sequence.num_generated == 0
            sampled = request.live if first else [chunk.sequence]
            sequences += sampled
            rows += [end - 1] * len(sampled)
        if not sequences:
            self.runner.wait()
            return events
        distinct = sorted(set(rows))
        logits = self.runner.logits(hidden, distinct)
        return events + self._sample(logits, [distinct.index(row) for row in rows], sequences)

    def _sample(self, logits: Tensor, rows: list[int], sequences: list[Sequence]) -> list[Event]:
        """Draw for each sequence from its row of logits; where the device draws, the host prepares the next step."""
        events: list[Event] = []
        drawn = [i for i, s in enumerate(sequences) if s.request.params.beam_width is None]
        searched: dict[str, list[int]] = {}
        for i, sequence in enumerate(sequences):
            if sequence.request.params.beam_width is not None:
                searched.setdefault(sequence.request.request_id, []).append(i)
        if drawn:
            part = [sequences[i] for i in drawn]
            draws = self.sampler.launch(logits, [rows[i] for i in drawn], part)
            self.runner.prepare(self.scheduler.likely_next())
            for sequence, one in zip(part, draws.result(), strict=True):
                events += self._append(self.jobs[sequence.request.request_id], sequence, one)
        for request_id, beams in searched.items():
            job = self.jobs[request_id]
            assert job.beams is not None
            job.num_generated_tokens += len(beams)
            self.num_generated_tokens += len(beams)
            scores = logits[[rows[i] for i in beams]].cpu()
            if job.beams.advance(scores, [sequences[i] for i in beams], self.manager):
                events += self._end_beams(job)
        return events

    def _append(self, job: Job, sequence: Sequence, drawn: Sample) -> list[Event]:
        """Add a token to a candidate; its Delta, and the request's end if that was it."""
        request, params = job.request, job.request.params
        sequence.token_ids.append(drawn.token_id)
        sequence.cumulative_logprob += drawn.logprob
        if drawn.logprobs is not None and params.needs_ranking:
            sequence.logprobs.append(drawn.logprobs)
        job.num_generated_tokens += 1
        self.num_generated_tokens += 1
        detokenizer = job.candidates[sequence.index].detokenizer
        reason: str | None = None
        stop_reason: str | int | None = None
        text = ""
        enough = sequence.num_generated >= params.min_tokens
        if drawn.token_id in request.stop_token_ids and enough:
            reason = "stop"
            stop_reason = drawn.token_id if drawn.token_id not in self.eos_token_ids else None
        elif (wrong := sequence.follow_guide(drawn.token_id)) is not None:
            reason, stop_reason = "error", wrong
        else:
            text = detokenizer.push(drawn.token_id, check_stop=enough)
            if detokenizer.matched_stop is not None:
                reason, stop_reason = "stop", detokenizer.matched_stop
            elif sequence.num_generated >= request.max_tokens:
                reason = "length"
        if reason is not None:
            text += detokenizer.finish()
        delta = job.delta(self.pool, sequence, [drawn.token_id], drawn.logprobs)
        delta.text, delta.finish_reason, delta.stop_reason = text, reason, stop_reason
        if reason is not None:
            self.scheduler.finish(sequence, reason, stop_reason)
            self.scheduler.retire(request)
        if params.needs_ranking:
            job.candidates[sequence.index].text += text
            return self._end_ranked(job) if not request.live else []
        return [delta, *self._close_if_done(job)]

    def _end_ranked(self, job: Job) -> list[Event]:
        """best_of: tell of the n candidates with the highest cumulative log-probability."""
        best = sorted(job.request.sequences, key=lambda s: -s.cumulative_logprob)[: job.request.params.n]
        events: list[Event] = [
            Delta(
                request_id=job.request.request_id,
                index=index,
                text=job.candidates[sequence.index].text,
                token_ids=sequence.generated_token_ids,
                logprobs=sequence.logprobs or None,
                cumulative_logprob=sequence.cumulative_logprob,
                finish_reason=sequence.finish_reason,
                stop_reason=sequence.stop_reason,
            )
            for index, sequence in enumerate(best)
        ]
        return events + self._close_if_done(job)

    def _end_beams(self, job: Job) -> list[Event]:
        assert job.beams is not None
        events: list[Event] = []
        for index, answer in enumerate(job.beams.best()):
            detokenizer = Detokenizer(self.decode)
            shown = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
            text = "".join(detokenizer.push(token_id) for token_id in shown) + detokenizer.finish()
            events.append(
                Delta(
                    request_id=job.request.request_id,
                    index=index,
                    text=text,
                    token_ids=answer.token_ids,
                    logprobs=answer.logprobs or None,
                    cumulative_logprob=answer.cumulative_logprob,
                    finish_reason=answer.finish_reason,
                    stop_reason=answer.stop_reason,
                )
            )
        for sequence in job.request.live:
            self.scheduler.finish(sequence, "stop")
        self.scheduler.retire(job.request)
        return events + self._close_if_done(job)

    def _tell_prefilled(self, chunk: Chunk, hidden: Tensor) -> Prefilled:
        request = chunk.sequence.request
        first = chunk.sequence.num_computed
        done = first + chunk.num_tokens
        report = None
        num_top = request.params.prompt_logprobs
        if num_top is not None:
            if first == 0:
                request.prompt_logprobs = [None]
            self._add_prompt_logprobs(request, hidden, first, num_top)
            if done == request.num_prompt_tokens:
                report = request.prompt_logprobs
        embedding = None
        if request.embeds:
            job = self.jobs[request.request_id]
            part = hidden.float().sum(0)
            job.hidden_sum = part if first == 0 or job.hidden_sum is None else job.hidden_sum + part
            if done == request.num_prompt_tokens:
                embedding = (job.hidden_sum / done).tolist()
        return Prefilled(
            request_id=request.request_id,
            num_computed_tokens=done,
            num_prompt_tokens=request.num_prompt_tokens,
            prompt_logprobs=report,
            embedding=embedding,
        )

    def _end_embedding(self, job: Job) -> list[Event]:
        for sequence in job.request.live:
            self.scheduler.finish(sequence, "stop")
        self.scheduler.retire(job.request)
        return self._close_if_done(job)

    def _add_prompt_logprobs(self, request: Request, hidden: Tensor, first: int, num_top: int) -> None:
        """What each token of the chunk said of the prompt's next one, a few rows of logits at a time."""
        for begin in range(0, hidden.shape[0], LOGITS_ROWS):
            part = hidden[begin : begin + LOGITS_ROWS]
            logprobs = self.runner.logits(part).log_softmax(-1).cpu()
            for row in range(part.shape[0]):
                following = first + begin + row + 1
                if following < request.num_prompt_tokens:
                    token_id = request.prompt_token_ids[following]
                    request.prompt_logprobs.append(position_logprobs(logprobs[row], token_id, num_top))

    def _close_if_done(self, job: Job) -> list[Event]:
        request = job.request
        if request.phase is not Phase.FINISHED:
            return []
        del self.jobs[request.request_id]
        return [
            Finished(
                request_id=request.request_id,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens or 0,
                num_generated_tokens=job.num_generated_tokens,
            )
        ]

    def _fail(self, step: Step, error: Exception) -> list[Event]:
        """End every request of a step that raised, and give their blocks back."""
        events: list[Event] = []
        for request_id in {chunk.sequence.request.request_id: None for chunk in step.chunks}:
            job = self.jobs.pop(request_id, None)
            if job is None:
                continue
            for sequence in job.request.live:
                sequence.finish_reason = "error"
            for sequence in job.request.sequences:
                self.manager.release(sequence)
            self.scheduler.retire(job.request)
            why = str(error) or type(error).__name__
            message = f"The engine failed on this request: {why}. Try it again; the log has the details."
            code = error.code if isinstance(error, LocalpagedError) else "engine_error"
            events.append(Failed(request_id=request_id, code=code, message=message))
        # What was cached while the step ran may be half written.
        self.pool.forget_cached()
        return events


def set_threads() -> None:
    """As many threads as the process may use; the kernels' and torch's pools take turns."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(count)
