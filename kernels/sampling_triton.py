"""The Triton kernels of sampling.py: what they compute, and in which order, is told there.

Up to four launches: each adjusted draw's own copy of its row, the entries added to the copies, a summary of every
chunk of the vocabulary, and the draws. A greedy draw ends with its summaries, one with a temperature alone reads one
chunk more, and only top_k, top_p and min_p read the row again.

Edges are searched on order-preserving integers, the keys of float32: negative numbers with all bits inverted, others
with the sign bit set. Each pass over the row divides the keys in question by four.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from localpaged.kernels.sampling import SamplingRows

SUMMARY_WARPS = 8
DRAW_WARPS = 16
ENTRIES_PER_PROGRAM = 256

# What the summary of a chunk holds, each [R, num_chunks].
RAW_MAX = tl.constexpr(0)
RAW_SUM = tl.constexpr(1)
MAX = tl.constexpr(2)
MASS = tl.constexpr(3)
NUM_SUMMARIES = 4

SIGN_BIT = tl.constexpr(0x80000000)
ALL_BITS = tl.constexpr(0xFFFFFFFF)
KEY_OF_MINUS_INFINITY = tl.constexpr(0x007FFFFF)
MINUS_INFINITY = tl.constexpr(float("-inf"))
TWO_TO_MINUS_32 = tl.constexpr(2.0**-32)


@triton.jit
def _key(value):  # type: ignore[no-untyped-def]
    """The uint32 key of a float32: keys are ordered as the numbers are, and the two zeros share one."""
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where((bits >= SIGN_BIT) & (value != 0.0), bits ^ ALL_BITS, bits | SIGN_BIT)


@triton.jit
def _value(key):  # type: ignore[no-untyped-def]
    """The float32 of a key."""
    return tl.where(key >= SIGN_BIT, key ^ SIGN_BIT, key ^ ALL_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _finite(maximum):  # type: ignore[no-untyped-def]
    """What to subtract from numbers of which this is the largest: -inf - -inf would be no number."""
    return tl.where(maximum == MINUS_INFINITY, 0.0, maximum)


@triton.jit
def _load_chunk(scores, start, num_tokens, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """CHUNK scores from start on, -inf past the end of the row."""
    tokens = start + tl.arange(0, CHUNK)
    return tl.load(scores + tokens, mask=tokens < num_tokens, other=MINUS_INFINITY)


@triton.jit
def _scores_of(  # type: ignore[no-untyped-def]
    draw, logits, row_stride, logits_row, copies, copy_of, num_tokens, ADJUSTED: tl.constexpr
):
    """Where a draw's scores begin: its adjusted copy where it has one, else its row of logits."""
    scores = logits + tl.load(logits_row + draw).to(tl.int64) * row_stride
    if ADJUSTED:
        copy = tl.load(copy_of + draw)
        if copy >= 0:
            scores = copies + copy.to(tl.int64) * num_tokens
    return scores


@triton.jit
def _copy_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, logits_row, draws, copies, copy_of, num_tokens, CHUNK: tl.constexpr
):
    """Grid (A, chunks). Copy the row of draws[a] to copies[a], and note a in copy_of[draws[a]]."""
    copy, chunk = tl.program_id(0), tl.program_id(1)
    draw = tl.load(draws + copy)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = tokens < num_tokens
    row = logits + tl.load(logits_row + draw).to(tl.int64) * row_stride
    tl.store(copies + copy.to(tl.int64) * num_tokens + tokens, tl.load(row + tokens, mask=mask), mask=mask)
    if chunk == 0:
        tl.store(copy_of + draw, copy)


@triton.jit(do_not_specialize=["num_entries"])
def _adjust_kernel(  # type: ignore[no-untyped-def]
    copies, copy_of, entry_row, token, seen, count, bias, repetition, presence, frequency, num_entries, num_tokens,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Grid (E / ENTRIES,). Apply each entry to the copy of its draw; no two entries share a place."""
    entries = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    mask = entries < num_entries
    draw = tl.load(entry_row + entries, mask=mask, other=0)
    tokens = tl.load(token + entries, mask=mask, other=0)
    copy = tl.load(copy_of + draw, mask=mask, other=-1)
    # A token that the row does not have must not write into the next row.
    mask = mask & (copy >= 0) & (tokens >= 0) & (tokens < num_tokens)
    place = copies + copy.to(tl.int64) * num_tokens + tokens
    values = tl.load(place, mask=mask, other=0.0)
    penalty = tl.load(repetition + draw, mask=mask, other=1.0)
    penalised = tl.where(values > 0, tl.div_rn(values, penalty), values * penalty)
    values = tl.where(tl.load(seen + entries, mask=mask, other=0) > 0, penalised, values)
    counts = tl.load(count + entries, mask=mask, other=0)
    subtracted = tl.load(presence + draw, mask=mask, other=0.0)
    subtracted += tl.load(frequency + draw, mask=mask, other=0.0) * counts.to(tl.float32)
    values -= tl.where(counts > 0, subtracted, 0.0)
    tl.store(place, values + tl.load(bias + entries, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["num_draws"])
def _summary_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, logits_row, copies, copy_of, temperature, summaries, likeliest, num_tokens, num_draws,
    ADJUSTED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (R, chunks). Of one chunk: raw maximum and sum of exp(logit - maximum); the maximum of the draw's scores,
    its lowest token, and the sum of exp((score - maximum) / temperature)."""
    draw, chunk = tl.program_id(0), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    place = summaries + draw.to(tl.int64) * num_chunks + chunk
    plane = num_draws.to(tl.int64) * num_chunks
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    row = logits + tl.load(logits_row + draw).to(tl.int64) * row_stride
    values = _load_chunk(row, chunk * CHUNK, num_tokens, CHUNK)
    maximum = tl.max(values, 0)
    tl.store(place + RAW_MAX * plane, maximum)
    tl.store(place + RAW_SUM * plane, tl.sum(tl.exp(values - _finite(maximum)), 0))
    if ADJUSTED:
        scores = _scores_of(draw, logits, row_stride, logits_row, copies, copy_of, num_tokens, ADJUSTED)
        values = _load_chunk(scores, chunk * CHUNK, num_tokens, CHUNK)
        maximum = tl.max(values, 0)
    first = tl.min(tl.where((values == maximum) & (tokens < num_tokens), tokens, num_tokens), 0)
    tl.store(place + MAX * plane, maximum)
    tl.store(likeliest + draw.to(tl.int64) * num_chunks + chunk, first)
    heat = tl.load(temperature + draw)
    if heat > 0:
        tl.store(place + MASS * plane, tl.sum(tl.exp((values - _finite(maximum)) * (1.0 / heat)), 0))


@triton.jit
def _mass_from(scores, num_tokens, maximum, scale, floor, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of exp((score - maximum) * scale) over scores of at least floor."""
    masses = tl.full([CHUNK], 0.0, tl.float32)
    for start in range(0, num_tokens, CHUNK):
        values = _load_chunk(scores, start, num_tokens, CHUNK)
        masses += tl.where(values >= floor, tl.exp((values - maximum) * scale), 0.0)
    return tl.sum(masses, 0)


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    scores, num_tokens, maximum, scale, low, target, WEIGHTED: tl.constexpr, CHUNK: tl.constexpr
):
    """The largest key from which on scores reach the target: a sum of weights, or (not WEIGHTED) a count.

    low: a key that is low enough. A count in float32 is exact up to 2^24 tokens.
    """
    # Scores from low on reach the target, those from high on do not. Sums in one order of fewer terms, none of them
    # negative, are never larger, rounded or not.
    high = _key(maximum) + 1
    going = low + 1 < high
    while going:
        step = (high - low + 3) // 4
        bottom, top = _value(low), _value(high)
        floor1 = _value(low + step)
        floor2 = _value(tl.minimum(low + 2 * step, high))
        floor3 = _value(tl.minimum(low + 3 * step, high))
        sums1 = tl.full([CHUNK], 0.0, tl.float32)
        sums2 = tl.full([CHUNK], 0.0, tl.float32)
        sums3 = tl.full([CHUNK], 0.0, tl.float32)
        smallest = tl.full([CHUNK], -MINUS_INFINITY, tl.float32)
        largest = tl.full([CHUNK], MINUS_INFINITY, tl.float32)
        for start in range(0, num_tokens, CHUNK):
            values = _load_chunk(scores, start, num_tokens, CHUNK)
            weights = tl.exp((values - maximum) * scale) if WEIGHTED else tl.full([CHUNK], 1.0, tl.float32)
            sums1 += tl.where(values >= floor1, weights, 0.0)
            sums2 += tl.where(values >= floor2, weights, 0.0)
            sums3 += tl.where(values >= floor3, weights, 0.0)
            inside = (values >= bottom) & (values < top)
            smallest = tl.where(inside, tl.minimum(smallest, values), smallest)
            largest = tl.where(inside, tl.maximum(largest, values), largest)
        reached = (tl.sum(sums1, 0) >= target).to(tl.uint32)
        reached += (tl.sum(sums2, 0) >= target).to(tl.uint32)
        reached += (tl.sum(sums3, 0) >= target).to(tl.uint32)
        first, last = tl.min(smallest, 0), tl.max(largest, 0)
        # One value between low and high is the edge, however many keys there are.
        going = first < last
        if going:
            low = tl.minimum(low + reached * step, high - 1)
            high = tl.minimum(tl.minimum(low + step, high), _key(last) + 1)
            low = tl.maximum(low, _key(first))
            going = low + 1 < high
    return low


@triton.jit
def _pick(weights, target):  # type: ignore[no-untyped-def]
    """The first place where the running float64 sum of weights exceeds target, and the sum before it.

    Never a place without weight: the last with any where rounding leaves no other; -1 where none has any.
    """
    places = tl.arange(0, weights.shape[0])
    sums = tl.cumsum(weights, 0)
    eligible = weights > 0
    last = tl.max(tl.where(eligible, places, -1), 0)
    first = tl.min(tl.where(eligible & (sums > target), places, weights.shape[0]), 0)
    place = tl.minimum(first, last)
    before = tl.sum(tl.where(places == place, sums - weights, 0.0), 0)
    return place, before


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    scores, num_tokens, maximum, masses, heat, top_k, top_p, min_p, uniform,
    NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One token by inverting the cumulative distribution of what the filters leave; -1 where nothing has weight.

    masses float64 [NUM_CHUNKS]: each chunk's, before any filter.
    """
    scale = 1.0 / heat
    floor = tl.full((), MINUS_INFINITY, tl.float32)
    low = tl.full((), KEY_OF_MINUS_INFINITY, tl.uint32)
    limits_count = (top_k > 0) & (top_k < num_tokens)
    if limits_count:
        low = _search(scores, num_tokens, maximum, scale, low, top_k.to(tl.float32), False, CHUNK)
        floor = _value(low)
    if top_p < 1.0:
        total = tl.sum(masses, 0).to(tl.float32)
        if limits_count:
            total = _mass_from(scores, num_tokens, maximum, scale, floor, CHUNK)
        low = _search(scores, num_tokens, maximum, scale, low, top_p * total, True, CHUNK)
        floor = _value(low)
    if min_p > 0.0:
        # However the logarithm of 1 is rounded, the likeliest stays.
        floor = tl.maximum(floor, tl.minimum(maximum, maximum + heat * tl.log(min_p)))
    if floor > MINUS_INFINITY:
        chunks = tl.arange(0, NUM_CHUNKS)
        masses = tl.full([NUM_CHUNKS], 0.0, tl.float64)
        for start in range(0, num_tokens, CHUNK):
            values = _load_chunk(scores, start, num_tokens, CHUNK)
            mass = tl.sum(tl.where(values >= floor, tl.exp((values - maximum) * scale), 0.0), 0)
            masses = tl.where(chunks == start // CHUNK, mass.to(tl.float64), masses)
    target = uniform * tl.sum(masses, 0)
    chunk, before = _pick(masses, target)
    token = tl.full((), -1, tl.int32)
    if chunk >= 0:
        values = _load_chunk(scores, chunk * CHUNK, num_tokens, CHUNK)
        weights = tl.where(values >= floor, tl.exp((values - maximum) * scale), 0.0)
        place, _ = _pick(weights.to(tl.float64), target - before)
        if place >= 0:
            token = chunk * CHUNK + place
    return token


@triton.jit(do_not_specialize=["num_draws"])
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, logits_row, copies, copy_of, temperature, top_k, top_p, min_p, seed, candidate, position,
    summaries, likeliest, out, num_tokens, num_chunks, num_draws,
    ADJUSTED: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (R,). Combine a draw's summaries, draw, and write the token and the bits of its log-probability."""
    draw = tl.program_id(0)
    chunks = tl.arange(0, NUM_CHUNKS)
    mask = chunks < num_chunks
    place = summaries + draw.to(tl.int64) * num_chunks + chunks
    plane = num_draws.to(tl.int64) * num_chunks
    raw_maxima = tl.load(place + RAW_MAX * plane, mask=mask, other=MINUS_INFINITY)
    raw_maximum = _finite(tl.max(raw_maxima, 0))
    raw_sums = tl.load(place + RAW_SUM * plane, mask=mask, other=0.0)
    log_norm = raw_maximum + tl.log(tl.sum(raw_sums * tl.exp(raw_maxima - raw_maximum), 0))
    maxima = tl.load(place + MAX * plane, mask=mask, other=MINUS_INFINITY)
    maximum = tl.max(maxima, 0)
    firsts = tl.load(likeliest + draw.to(tl.int64) * num_chunks + chunks, mask=mask, other=num_tokens)
    token = tl.min(tl.where(maxima == maximum, firsts, num_tokens), 0)
    heat = tl.load(temperature + draw)
    if (heat > 0) & (maximum > MINUS_INFINITY):
        scores = _scores_of(draw, logits, row_stride, logits_row, copies, copy_of, num_tokens, ADJUSTED)
        masses = tl.load(place + MASS * plane, mask=mask, other=0.0) * tl.exp((maxima - maximum) * (1.0 / heat))
        word, _, _, _ = tl.philox(
            tl.load(seed + draw).to(tl.uint64), tl.load(position + draw), tl.load(candidate + draw), 0, 0
        )
        drawn = _draw(
            scores, num_tokens, maximum, masses.to(tl.float64), heat, tl.load(top_k + draw), tl.load(top_p + draw),
            tl.load(min_p + draw), word.to(tl.float64) * TWO_TO_MINUS_32, NUM_CHUNKS, CHUNK,
        )  # fmt: skip
        # A score of +inf leaves no weights to draw by: the likeliest stays.
        token = tl.where(drawn >= 0, drawn, token)
    logit = tl.load(logits + tl.load(logits_row + draw).to(tl.int64) * row_stride + token)
    tl.store(out + draw, token)
    tl.store(out + num_draws + draw, (logit - log_norm).to(tl.int32, bitcast=True))


def launch_sampling(logits: Tensor, rows: SamplingRows, out: Tensor, chunk_size: int) -> None:
    """Draw from logits [N, V] into out int32 [2, R]; everything is checked already and R > 0."""
    num_draws, num_tokens = len(rows.logits_row), logits.shape[1]
    num_chunks = triton.cdiv(num_tokens, chunk_size)
    stride = logits.stride(0)
    table = rows.adjustments
    adjusted = table is not None and len(table.draws) > 0
    copies, copy_of = logits, rows.logits_row
    if table is not None and adjusted:
        copies = logits.new_empty(len(table.draws), num_tokens)
        copy_of = torch.full_like(rows.logits_row, -1)
        _copy_kernel[(len(table.draws), num_chunks)](
            logits, stride, rows.logits_row, table.draws, copies, copy_of, num_tokens, CHUNK=chunk_size,
            num_warps=SUMMARY_WARPS,
        )  # fmt: skip
        num_entries = len(table.token)
        if num_entries:
            _adjust_kernel[(triton.cdiv(num_entries, ENTRIES_PER_PROGRAM),)](
                copies, copy_of, table.entry_row, table.token, table.seen, table.count, table.bias,
                table.repetition_penalty, table.presence_penalty, table.frequency_penalty, num_entries, num_tokens,
                ENTRIES=ENTRIES_PER_PROGRAM,
            )  # fmt: skip
    summaries = logits.new_empty(NUM_SUMMARIES, num_draws, num_chunks)
    likeliest = torch.empty(num_draws, num_chunks, dtype=torch.int32, device=logits.device)
    _summary_kernel[(num_draws, num_chunks)](
        logits, stride, rows.logits_row, copies, copy_of, rows.temperature, summaries, likeliest, num_tokens, num_draws,
        ADJUSTED=adjusted, CHUNK=chunk_size, num_warps=SUMMARY_WARPS,
    )  # fmt: skip
    _draw_kernel[(num_draws,)](
        logits, stride, rows.logits_row, copies, copy_of, rows.temperature, rows.top_k, rows.top_p, rows.min_p,
        rows.seed, rows.candidate, rows.position, summaries, likeliest, out, num_tokens, num_chunks, num_draws,
        ADJUSTED=adjusted, NUM_CHUNKS=triton.next_power_of_2(num_chunks), CHUNK=chunk_size, num_warps=DRAW_WARPS,
    )  # fmt: skip
