"""Beam search over sequences that share blocks: beams fork, die and are re-pointed, nothing is copied.

Beams are kept as in transformers: of the 2 * width likeliest continuations, those that end become
finished hypotheses and the width best others go on; it ends when no beam can still beat the worst of
width finished ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from localpaged.engine.kv_cache_manager import KVCacheManager
from localpaged.engine.messages import PositionLogprobs
from localpaged.engine.sampler import adjust, position_logprobs
from localpaged.engine.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer and its score: cumulative log-probability over length ** length_penalty."""

    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[PositionLogprobs]
    finish_reason: str
    stop_reason: int | None
    score: float


@dataclass(frozen=True, slots=True)
class Continuation:
    """One token after one beam."""

    beam: Sequence
    token_id: int
    cumulative_logprob: float
    logprobs: PositionLogprobs | None


class BeamSearch:
    """The beams of one request. width sequences run at all times."""

    def __init__(self, request: Request) -> None:
        assert request.params.beam_width is not None
        self.request = request
        self.width = request.params.beam_width
        self.finished: list[Hypothesis] = []

    def advance(self, logits: Tensor, beams: list[Sequence], manager: KVCacheManager) -> bool:
        """Take the beams one token further; logits float32 [len(beams), V]. True when the search is over.

        At the first token all beams are equal, and only one of them counts.
        """
        if beams[0].num_generated == 0:
            beams = beams[:1]
            logits = logits[:1]
        ranked = self._rank(logits, beams)
        kept: list[Continuation] = []
        for position, continuation in enumerate(ranked):
            if continuation.token_id in self.request.stop_token_ids:
                # Only what ranks among the best width may end, so that weak early ends do not crowd out.
                if position < self.width:
                    self._finish(continuation, "stop", continuation.token_id)
            elif len(kept) < self.width:
                kept.append(continuation)
        self._regroup(kept, manager)
        length = self.request.live[0].num_generated
        if length >= self.request.max_tokens:
            for beam in self.request.live:
                self._add(beam.generated_token_ids, beam.cumulative_logprob, beam.logprobs, "length", None)
            return True
        return self._cannot_improve(length)

    def best(self) -> list[Hypothesis]:
        """The n best finished answers, best first."""
        return sorted(self.finished, key=lambda answer: -answer.score)[: self.request.params.n]

    def _rank(self, logits: Tensor, beams: list[Sequence]) -> list[Continuation]:
        log_norm = logits.logsumexp(-1, keepdim=True)
        scores = adjust(logits, beams).log_softmax(-1)
        totals = scores + torch.tensor([beam.cumulative_logprob for beam in beams])[:, None]
        count = min(2 * self.width, totals.numel())
        values, flat = totals.flatten().topk(count)
        num_top = self.request.params.logprobs
        ranked = []
        for value, index in zip(values.tolist(), flat.tolist(), strict=True):
            row, token_id = divmod(index, logits.shape[1])
            report = None
            if num_top is not None:
                report = position_logprobs(logits[row] - log_norm[row], token_id, num_top)
            ranked.append(Continuation(beams[row], token_id, value, report))
        return ranked

    def _regroup(self, kept: list[Continuation], manager: KVCacheManager) -> None:
        """Give each kept continuation a sequence: the first of a beam goes on in it, others fork from it."""
        live = self.request.live
        owners = {continuation.beam.index for continuation in kept}
        unused = [sequence for sequence in live if sequence.index not in owners]
        for sequence in unused:
            manager.release(sequence)
        taken: set[int] = set()
        grown: list[tuple[Sequence, Continuation]] = []
        for continuation in kept:
            beam = continuation.beam
            if beam.index not in taken:
                taken.add(beam.index)
                grown.append((beam, continuation))
                continue
            child = unused.pop()
            manager.fork(beam, child)
            child.token_ids = list(beam.token_ids)
            child.logprobs = list(beam.logprobs)
            grown.append((child, continuation))
        for sequence, continuation in grown:
            sequence.token_ids.append(continuation.token_id)
            sequence.cumulative_logprob = continuation.cumulative_logprob
            if continuation.logprobs is not None:
                sequence.logprobs.append(continuation.logprobs)

    def _finish(self, continuation: Continuation, reason: str, stop_reason: int) -> None:
        beam = continuation.beam
        report = [] if continuation.logprobs is None else [continuation.logprobs]
        token_ids = [*beam.generated_token_ids, continuation.token_id]
        self._add(token_ids, continuation.cumulative_logprob, beam.logprobs + report, reason, stop_reason)

    def _add(
        self,
        token_ids: list[int],
        cumulative_logprob: float,
        logprobs: list[PositionLogprobs],
        reason: str,
        stop_reason: int | None,
    ) -> None:
        score = self._score(cumulative_logprob, len(token_ids))
        answer = Hypothesis(token_ids, cumulative_logprob, list(logprobs), reason, stop_reason, score)
        self.finished = sorted([*self.finished, answer], key=lambda known: -known.score)[: self.width]

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / length**self.request.params.length_penalty

    def _cannot_improve(self, length: int) -> bool:
        if len(self.finished) < self.width:
            return False
        best_running = max(beam.cumulative_logprob for beam in self.request.live)
        return self.finished[-1].score >= self._score(best_running, length)
