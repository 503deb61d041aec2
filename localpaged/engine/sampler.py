"""Draws each sequence's next token from its logits, all rows of a step at once.

In this order, as in transformers: logit_bias and penalties, min_tokens, temperature, top_k, top_p,
min_p, one draw by inverting the cumulative distribution. Reported log-probabilities are those of
the model, before any of that.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from localpaged.engine.messages import PositionLogprobs, TokenLogprob
from localpaged.engine.philox import uniforms
from localpaged.engine.sequence import Sequence

FIRST_TOP_P_WIDTH = 256


@dataclass(frozen=True, slots=True)
class Sample:
    """One drawn token; logprobs where the request asked for them."""

    token_id: int
    logprob: float
    logprobs: PositionLogprobs | None


class PendingDraws(Protocol):
    """Draws that may still be under way."""

    def result(self) -> list[Sample]:
        """Wait for the draws; one for each sequence, in the order of the launch."""
        ...


class Sampler(Protocol):
    """What the engine asks of a device: HostSampler, or device_sampler.py's."""

    def launch(self, logits: Tensor, rows: list[int], sequences: list[Sequence]) -> PendingDraws:
        """Start drawing: sequences[i] from logits[rows[i]], float32 [N, V]. logits is left as it is."""
        ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """Draws that are made."""

    samples: list[Sample]

    def result(self) -> list[Sample]:
        return self.samples


class HostSampler:
    """Draws on the CPU, at once."""

    def launch(self, logits: Tensor, rows: list[int], sequences: list[Sequence]) -> Drawn:
        whole = rows == list(range(logits.shape[0]))
        return Drawn(sample(logits if whole else logits[rows], sequences))


def sample(logits: Tensor, sequences: list[Sequence]) -> list[Sample]:
    """Draw one token for each row of logits, float32 [R, V], whose sequence is sequences[row].

    logits is left as it is.
    """
    adjusted = adjust(logits, sequences)
    token_ids = adjusted.argmax(-1)
    random_rows = [row for row, sequence in enumerate(sequences) if not sequence.request.params.greedy]
    if random_rows:
        drawn = _draw(
            adjusted if len(random_rows) == len(sequences) else adjusted[random_rows],
            [sequences[row] for row in random_rows],
        )
        token_ids[random_rows] = drawn
    log_norm = logits.logsumexp(-1)
    chosen = (logits.gather(1, token_ids[:, None])[:, 0] - log_norm).tolist()
    ids = token_ids.tolist()
    samples = []
    for row, sequence in enumerate(sequences):
        num_top = sequence.request.params.logprobs
        report = None
        if num_top is not None:
            report = position_logprobs(logits[row] - log_norm[row], ids[row], num_top)
        samples.append(Sample(ids[row], chosen[row], report))
    return samples


def position_logprobs(logprobs: Tensor, token_id: int, num_top: int) -> PositionLogprobs:
    """The report on one position: the chosen token and the num_top likeliest, from logprobs [V]."""
    value = logprobs[token_id]
    rank = int((logprobs > value).sum()) + 1
    top: list[TokenLogprob] = []
    if num_top:
        values, ids = logprobs.topk(num_top)
        top = [
            TokenLogprob(int(i), float(v), position + 1)
            for position, (v, i) in enumerate(zip(values.tolist(), ids.tolist(), strict=True))
        ]
    return PositionLogprobs(TokenLogprob(token_id, float(value), rank), top)


def adjust(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Apply logit_bias, penalties and min_tokens; a new tensor where a row needs any of them."""
    rows = [row for row, sequence in enumerate(sequences) if _needs_adjusting(sequence)]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        sequence = sequences[row]
        params = sequence.request.params
        scores = logits[row]
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sequence.token_ids).unique()
            values = scores[seen]
            penalty = params.repetition_penalty
            scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if (params.presence_penalty or params.frequency_penalty) and sequence.num_generated:
            seen, counts = torch.tensor(sequence.generated_token_ids).unique(return_counts=True)
            scores[seen] -= params.presence_penalty + params.frequency_penalty * counts
        for token_id, bias in params.logit_bias.items():
            scores[token_id] += bias
        if sequence.num_generated < params.min_tokens and sequence.request.stop_token_ids:
            scores[sorted(sequence.request.stop_token_ids)] = -torch.inf
        if sequence.guide is not None:
            scores.masked_fill_(torch.from_numpy(~sequence.guide.allowed), -torch.inf)
    return logits


def _needs_adjusting(sequence: Sequence) -> bool:
    params = sequence.request.params
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or sequence.num_generated < params.min_tokens
        or sequence.guide is not None
    )


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Temperature, filters and one draw for each row of logits [R, V]; token ids int64 [R]."""
    params = [sequence.request.params for sequence in sequences]
    logits = logits / torch.tensor([p.temperature for p in params])[:, None]
    _filter_top(logits, [p.top_k for p in params], [p.top_p for p in params])
    if any(p.min_p > 0 for p in params):
        floor = torch.tensor([p.min_p for p in params]).log()[:, None] + logits.amax(-1, keepdim=True)
        logits.masked_fill_(logits < floor, -torch.inf)
    cumulative = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    draws = uniforms(
        [sequence.request.seed for sequence in sequences],
        [sequence.index for sequence in sequences],
        [sequence.num_generated for sequence in sequences],
    )
    target = torch.from_numpy(draws) * cumulative[:, -1]
    # The first token whose cumulative probability exceeds the target: never one of probability zero.
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def _filter_top(logits: Tensor, top_k: list[int], top_p: list[float]) -> None:
    """Set what top_k and top_p leave out to -inf, in place; logits [R, V].

    Only the likeliest are sorted, as many as top_k asks for or as it takes to reach top_p.
    """
    vocab_size = logits.shape[1]
    rows = [row for row, (k, p) in enumerate(zip(top_k, top_p, strict=True)) if 0 < k < vocab_size or p < 1.0]
    width = max([FIRST_TOP_P_WIDTH, *(k for k in top_k if k < vocab_size)])
    while rows:
        ks = torch.tensor([top_k[row] if 0 < top_k[row] < vocab_size else vocab_size for row in rows])
        ps = torch.tensor([top_p[row] for row in rows], dtype=torch.float64)
        width = min(vocab_size, width)
        part = logits[rows]
        values, _ = part.topk(width)
        kept = torch.arange(width) < ks[:, None]
        log_norm = torch.where(
            ks < vocab_size,
            values.masked_fill(~kept, -torch.inf).logsumexp(-1),
            part.logsumexp(-1),
        )
        mass = (values.double() - log_norm[:, None].double()).exp().masked_fill(~kept, 0.0).cumsum(-1)
        # A token is kept while those before it do not reach top_p; the first always is.
        kept[:, 1:] &= mass[:, :-1] < ps[:, None]
        complete = (ks <= width) | (mass[:, -1] >= ps) | (width == vocab_size)
        num_kept = kept.sum(-1)
        floor = values.gather(1, num_kept[:, None] - 1)
        floor = floor.masked_fill(~complete[:, None], -torch.inf)
        logits[rows] = part.masked_fill(part < floor, -torch.inf)
        rows = [row for row, done in zip(rows, complete.tolist(), strict=True) if not done]
        width *= 8
