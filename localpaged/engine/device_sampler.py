"""Draws each sequence's next token on the device of the logits; the host learns of it when it asks.

The same order of operations and the same random numbers as sampler.py. A launch moves the parameters in one copy and
starts one copy back, of tokens and log-probabilities, and another of the reports that requests asked for. Nothing
waits before result().
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localpaged.engine.messages import PositionLogprobs, TokenLogprob
from localpaged.engine.sampler import Sample
from localpaged.engine.sequence import Sequence
from localpaged.kernels.sampling import Adjustments, SamplingRows, sample_rows

# Each parameter begins at a multiple of 16 bytes, whatever came before: kernels are compiled for that.
ALIGNMENT_WORDS = 4

Array = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """Draws under way. The host buffers belong to the copies until ready.

    drawn int32 [2, R]: token ids and the bits of their log-probabilities. reported: for draws whose requests asked,
    num_top log-probabilities as bits, num_top token ids and the rank of the drawn token; int32 [P, 2 * num_top + 1].
    num_tops: how many alternatives each draw reports, None for no report.
    """

    drawn: Tensor
    reported: Tensor | None
    num_tops: list[int | None]
    ready: torch.cuda.Event | None

    def result(self) -> list[Sample]:
        """Wait for the draws; one Sample for each, in the order of the launch."""
        if self.ready is not None:
            self.ready.synchronize()
        token_ids = self.drawn[0].tolist()
        logprobs = self.drawn[1].view(torch.float32).tolist()
        reports = iter(() if self.reported is None else self.reported.unbind())
        return [
            Sample(token_id, logprob, None if num_top is None else _report(next(reports), token_id, logprob, num_top))
            for token_id, logprob, num_top in zip(token_ids, logprobs, self.num_tops, strict=True)
        ]


class DeviceSampler:
    """Draws from logits on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Copies to and from pinned memory go on while the host does other things.
        self.pinned = device.type == "cuda"

    def launch(self, logits: Tensor, rows: list[int], sequences: list[Sequence]) -> PendingSamples:
        """Start drawing: sequences[i] from logits[rows[i]], float32 [N, V]. logits is left as it is.

        Rows may repeat. The sequences may change once this returns; the logits not before the draws are done.
        Raises ValueError for a row that logits does not have.
        """
        if len(rows) != len(sequences):
            raise ValueError(f"{len(rows)} rows for {len(sequences)} sequences")
        if any(not 0 <= row < logits.shape[0] for row in rows):
            raise ValueError(f"rows {rows} are not all among the {logits.shape[0]} of logits")
        raw, raw_rows = logits, rows
        if any(sequence.guide is not None for sequence in sequences):
            logits, rows = self._guided(logits, rows, sequences), list(range(len(rows)))
        num_tops = [sequence.request.params.logprobs for sequence in sequences]
        reporting = [draw for draw, num_top in enumerate(num_tops) if num_top is not None]
        arrays = _parameters(rows, sequences) | _adjustments(sequences)
        arrays["reporting"] = np.array(reporting, np.int32)
        moved = self._move(arrays)
        reporting_draws = moved.pop("reporting")
        table = None
        if "entry_row" in moved:
            table = Adjustments(**{name: moved.pop(name) for name in Adjustments.__dataclass_fields__})
        draws = SamplingRows(**moved, adjustments=table)
        drawn = torch.empty(2, len(sequences), dtype=torch.int32, device=logits.device)
        sample_rows(logits, draws, drawn)
        if logits is not raw:
            # What is reported is the model's own, whatever was allowed.
            logits = raw[self._on_device(raw_rows)]
            chosen = logits.log_softmax(-1).gather(1, drawn[0].long()[:, None])[:, 0]
            drawn[1] = chosen.view(torch.int32)
        reported = None
        if reporting:
            widest = max(num_top for num_top in num_tops if num_top is not None)
            logits_rows = logits[draws.logits_row[reporting_draws]]
            reported = self._start_copy(_measure(logits_rows, drawn[0, reporting_draws], widest))
        on_host = self._start_copy(drawn)
        ready = None
        if self.pinned:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
        return PendingSamples(on_host, reported, num_tops, ready)

    def _guided(self, logits: Tensor, rows: list[int], sequences: list[Sequence]) -> Tensor:
        """Each draw's own row of logits [R, V], -inf where its guide, if it has one, does not go."""
        allowed = np.ones((len(sequences), logits.shape[1]), dtype=np.bool_)
        for row, sequence in enumerate(sequences):
            if sequence.guide is not None:
                allowed[row] = sequence.guide.allowed
        return logits[self._on_device(rows)].masked_fill(~self._on_device(allowed), -torch.inf)

    def _on_device(self, values: list[int] | NDArray[np.bool_]) -> Tensor:
        host = torch.tensor(values) if isinstance(values, list) else torch.from_numpy(values)
        return (host.pin_memory() if self.pinned else host).to(self.device, non_blocking=True)

    def _move(self, arrays: dict[str, Array]) -> dict[str, Tensor]:
        """The arrays on the device, in one copy: int32 words of one host buffer and views of them."""
        sizes = {name: -(-array.nbytes // (4 * ALIGNMENT_WORDS)) * ALIGNMENT_WORDS for name, array in arrays.items()}
        # A fresh buffer: the allocator of pinned memory gives none back while a copy reads it.
        host = torch.empty(sum(sizes.values()), dtype=torch.int32, pin_memory=self.pinned)
        words = host.numpy()
        start = 0
        for name, array in arrays.items():
            words[start : start + array.nbytes // 4] = array.view(np.int32)
            start += sizes[name]
        sections = host.to(self.device, non_blocking=True).split(list(sizes.values()))
        return {
            name: section[: array.nbytes // 4].view(torch.from_numpy(array).dtype)
            for (name, array), section in zip(arrays.items(), sections, strict=True)
        }

    def _start_copy(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pinned)
        return host.copy_(tensor, non_blocking=True)


def _parameters(rows: list[int], sequences: list[Sequence]) -> dict[str, Array]:
    """The fields of SamplingRows but for adjustments, on the host."""
    params = [sequence.request.params for sequence in sequences]
    seeds = np.array([sequence.request.seed % 2**64 for sequence in sequences], np.uint64)
    return {
        "seed": seeds.view(np.int64),
        "logits_row": np.array(rows, np.int32),
        "temperature": np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
        # More than any vocabulary has is the same as none.
        "top_k": np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "candidate": np.array([sequence.index for sequence in sequences], np.int32),
        "position": np.array([sequence.num_generated for sequence in sequences], np.int32),
    }


def _adjustments(sequences: list[Sequence]) -> dict[str, Array]:
    """The fields of Adjustments, on the host; nothing where no sequence needs any."""
    draws: list[int] = []
    entries: list[tuple[Array, ...]] = []
    for draw, sequence in enumerate(sequences):
        own = _entries(sequence)
        if own is not None:
            draws.append(draw)
            entries.append((np.full(len(own[0]), draw, np.int32), *own))
    if not draws:
        return {}
    params = [sequence.request.params for sequence in sequences]
    columns = (np.concatenate(column) for column in zip(*entries, strict=True))
    return {
        "draws": np.array(draws, np.int32),
        **dict(zip(("entry_row", "token", "seen", "count", "bias"), columns, strict=True)),
        "repetition_penalty": np.array([p.repetition_penalty for p in params], np.float32),
        "presence_penalty": np.array([p.presence_penalty for p in params], np.float32),
        "frequency_penalty": np.array([p.frequency_penalty for p in params], np.float32),
    }


def _entries(sequence: Sequence) -> tuple[Array, Array, Array, Array] | None:
    """Token, seen, count and bias of every token that a sequence adjusts, each once; None where there is none."""
    params, request = sequence.request.params, sequence.request
    biases = dict(params.logit_bias)
    if sequence.num_generated < params.min_tokens:
        biases |= dict.fromkeys(request.stop_token_ids, -np.inf)
    biased = np.array(list(biases), np.int32)
    present = np.array(sequence.token_ids if params.repetition_penalty != 1.0 else [], np.int32)
    counts_answer = params.presence_penalty or params.frequency_penalty
    answer = np.array(sequence.generated_token_ids if counts_answer else [], np.int32)
    token = np.unique(np.concatenate([biased, present, answer]))
    if not len(token):
        return None
    seen = np.zeros(len(token), np.int32)
    seen[np.searchsorted(token, present)] = 1
    count = np.bincount(np.searchsorted(token, answer), minlength=len(token)).astype(np.int32)
    bias = np.zeros(len(token), np.float32)
    bias[np.searchsorted(token, biased)] = list(biases.values())
    return token, seen, count, bias


def _measure(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """What PendingSamples.reported holds, for rows of logits [P, V] and the tokens int32 [P] drawn from them."""
    num_top = min(num_top, logits.shape[1])
    chosen = logits.gather(1, token_ids.long()[:, None])
    ranks = (logits > chosen).sum(-1, keepdim=True) + 1
    values, ids = logits.topk(num_top)
    logprobs = values - logits.logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.view(torch.int32), ids.to(torch.int32), ranks.to(torch.int32)], 1)


def _report(measured: Tensor, token_id: int, logprob: float, num_top: int) -> PositionLogprobs:
    """The report on one draw from its row of what _measure returned."""
    widest = len(measured) // 2
    values = measured[:widest].view(torch.float32).tolist()[:num_top]
    ids = measured[widest : 2 * widest].tolist()
    top = [TokenLogprob(ids[place], value, place + 1) for place, value in enumerate(values)]
    return PositionLogprobs(TokenLogprob(token_id, logprob, int(measured[-1])), top)
