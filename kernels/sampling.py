"""Draw tokens from rows of logits: adjustments, temperature, top_k, top_p, min_p and one draw, without a sort.

logits [N, V], R draws, each from one row -> token_ids [R] and the model's log-probabilities of them [R].
Source: arXiv:1904.09751 (top_p); arXiv:2407.01082 (min_p); arXiv:1909.05858, section 4.1 (repetition penalty); Philox
in Salmon et al., SC 2011. Bound by memory: a draw reads its row once, 4 * V bytes (greedy, temperature), and some ten
times more, from the cache, for each of top_k and top_p.
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

# Logits that one program summarises: what 16 warps hold in registers.
CHUNK_SIZE = 4096

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What is added to logits before a draw: one entry for each (draw, token) that has any; E entries.

    draws int32 [A]: the draws that have entries, each once. entry_row int32 [E]: an entry's draw. token int32 [E].
    seen int32 [E]: 1 where repetition_penalty applies. count int32 [E]: occurrences in the answer. bias float32 [E],
    which may be -inf. repetition_penalty, presence_penalty, frequency_penalty float32 [R]: each draw's.
    """

    draws: Tensor
    entry_row: Tensor
    token: Tensor
    seen: Tensor
    count: Tensor
    bias: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The parameters of R draws, on the device of the logits.

    logits_row int32 [R]: the row of logits; draws may share one. temperature float32 [R]: 0 takes the likeliest.
    top_k int32 [R]: 0 is off. top_p float32 [R]: 1 is off. min_p float32 [R]: 0 is off. The draw's random number is
    that of seed int64 [R] (64 bits), candidate int32 [R] and position int32 [R].
    """

    logits_row: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    candidate: Tensor
    position: Tensor
    adjustments: Adjustments | None = None


def uniform_reference(seed: int, candidate: int, position: int) -> float:
    """The number in [0, 1) of a draw: the first word of Philox4x32-10."""
    counter = (position, candidate, 0, 0)
    key = (seed & WORD, seed >> 32 & WORD)
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = PHILOX_MULTIPLIERS[0] * counter[0], PHILOX_MULTIPLIERS[1] * counter[2]
        counter = (
            product1 >> 32 ^ counter[1] ^ key[0],
            product1 & WORD,
            product0 >> 32 ^ counter[3] ^ key[1],
            product0 & WORD,
        )
        key = ((key[0] + PHILOX_WEYL[0]) & WORD, (key[1] + PHILOX_WEYL[1]) & WORD)
    return counter[0] * 2.0**-32


def adjusted_reference(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Each draw's own logits [R, V]: repetition penalty, then presence and frequency penalties, then biases."""
    scores = logits[rows.logits_row.long()].clone()
    table = rows.adjustments
    if table is None:
        return scores
    draw, token = table.entry_row.long(), table.token.long()
    values = scores[draw, token]
    repetition = table.repetition_penalty[draw]
    penalised = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(table.seen > 0, penalised, values)
    counted = table.presence_penalty[draw] + table.frequency_penalty[draw] * table.count
    values = values - torch.where(table.count > 0, counted, 0.0)
    scores[draw, token] = values + table.bias
    return scores


def kept_weights_reference(scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """What the filters leave of scores [V]: float64 [V], proportional to probabilities, 0 where left out.

    Dividing by the temperature keeps the order, so top_k compares scores. Ties at an edge all stay.
    """
    weights = ((scores.double() - scores.max()) / temperature).exp()
    kept = torch.ones_like(scores, dtype=torch.bool)
    if 0 < top_k < len(scores):
        kept &= scores >= scores.topk(top_k).values[-1]
    if top_p < 1.0:
        descending = scores.argsort(descending=True)
        mass = (weights * kept)[descending].cumsum(0)
        # The fewest whose mass reaches top_p of what top_k left.
        edge = min(int((mass < top_p * mass[-1]).sum()), len(scores) - 1)
        kept &= scores >= scores[descending[edge]]
    if min_p > 0.0:
        kept &= scores.double() >= scores.max().double() + temperature * math.log(min_p)
    return weights * kept


def sample_rows_reference(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Token ids int32 [R] and log-probabilities float32 [R] of draws from logits [N, V], one draw at a time."""
    token_ids = []
    for draw, scores in enumerate(adjusted_reference(logits, rows)):
        temperature = float(rows.temperature[draw])
        if temperature <= 0.0:
            token_ids.append(int(scores.argmax()))
            continue
        weights = kept_weights_reference(
            scores, temperature, int(rows.top_k[draw]), float(rows.top_p[draw]), float(rows.min_p[draw])
        )
        cumulative = weights.cumsum(0)
        uniform = uniform_reference(int(rows.seed[draw]), int(rows.candidate[draw]), int(rows.position[draw]))
        # The first token whose cumulative mass exceeds the target: never one of probability zero.
        token_ids.append(int((cumulative <= uniform * cumulative[-1]).sum()))
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    logprobs = logits.double().log_softmax(-1)[rows.logits_row.long(), chosen]
    return chosen.to(torch.int32), logprobs.float()


def sample_rows(
    logits: Tensor, rows: SamplingRows, out: Tensor | None = None, chunk_size: int = CHUNK_SIZE
) -> tuple[Tensor, Tensor]:
    """Token ids int32 [R] and the model's log-probabilities of them float32 [R], drawn from logits float32 [N, V].

    logits is left as it is. A tie for the likeliest goes to the lowest id. Neither copies to the host nor waits. out
    int32 [2, R], when given, takes the ids and the bits of the log-probabilities, and the results are views of it.
    chunk_size: logits to a program, a power of two. Raises ValueError when shapes, types or devices do not fit.
    """
    num_draws = _checked_size(logits, rows)
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size {chunk_size} must be a power of two")
    if out is None:
        out = torch.empty(2, num_draws, dtype=torch.int32, device=logits.device)
    elif out.shape != (2, num_draws) or out.dtype is not torch.int32 or not out.is_contiguous():
        raise ValueError(f"out {out.dtype} {tuple(out.shape)} must be contiguous int32 [2, {num_draws}]")
    if num_draws:
        # Not above: there is no Triton on macOS.
        from localpaged.kernels.sampling_triton import launch_sampling

        launch_sampling(logits, rows, out, chunk_size)
    return out[0], out[1].view(torch.float32)


def _checked_size(logits: Tensor, rows: SamplingRows) -> int:
    """The number of draws; raises ValueError when anything does not fit."""
    if logits.ndim != 2 or logits.dtype is not torch.float32 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(f"logits {logits.dtype} {tuple(logits.shape)} must be float32 [N, V], rows contiguous, V > 0")
    num_draws = len(rows.logits_row)
    if num_draws and logits.shape[0] == 0:
        raise ValueError(f"{num_draws} draws need a row of logits, which has none")
    floats = {"temperature", "top_p", "min_p", "bias", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    expected: list[tuple[str, Tensor, int]] = [
        (field.name, getattr(rows, field.name), num_draws) for field in fields(rows) if field.name != "adjustments"
    ]
    table = rows.adjustments
    if table is not None:
        sizes = {name: len(table.token) for name in ("entry_row", "token", "seen", "count", "bias")}
        sizes["draws"] = len(table.draws)
        if sizes["draws"] > num_draws:
            raise ValueError(f"adjustments name {sizes['draws']} draws of {num_draws}")
        expected += [
            (field.name, getattr(table, field.name), sizes.get(field.name, num_draws)) for field in fields(table)
        ]
    for name, tensor, size in expected:
        dtype = torch.float32 if name in floats else torch.int64 if name == "seed" else torch.int32
        if tensor.shape != (size,) or tensor.dtype is not dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} {tensor.dtype} {tuple(tensor.shape)} must be contiguous {dtype} [{size}]")
        if tensor.device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}, logits on {logits.device}")
    return num_draws
