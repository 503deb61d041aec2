"""Attention of planned segments on a GPU: the Triton kernels of paged_attention.py and prefill_attention.py.

q [T, H, Dh] x caches [num_blocks, Hkv, block_size, Dh] -> [T, H, Dh]. One program takes one segment and one KV head:
the segment's rows times the query heads of that KV head are the lanes of one product, so that keys and values are
read once for all of them. Where rows are split, each segment leaves its lanes' normalised sum and the logarithm of
their weights, and a second kernel merges them; a group's shared prefix is merged there too, by no launch of its own.
Source: PagedAttention (arXiv:2309.06180), section 4.3; Hydragen (arXiv:2402.05099), section 3.2; Flash-Decoding;
FlashAttention (arXiv:2205.14135).
Decoding is bound by memory: 2 * Hkv * Dh elements a key that is read. Prefill is bound by arithmetic: 4 * H * Dh
operations for each pair of a query and a key that it sees.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from localpaged.kernels.attention_plan import RANGE_FIELDS, SEGMENT_FIELDS
from localpaged.kernels.paged_kv import KVFormat, LayerKV
from localpaged.kernels.planned_batch import PlanTensors
from localpaged.kernels.tile_config import TileConfig
from localpaged.kernels.triton_target import CAST_BEFORE_DOT

LOG2_E = 1.4426950408889634
MERGED_AT_ONCE = 16
KV_CODES = {KVFormat.INT8: 1, KVFormat.FP8: 2}


@triton.jit
def _load_tile(values, offsets, mask, MASKED: tl.constexpr, KV: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of keys or values in the products' type, its scale left out."""
    x = tl.load(values + offsets, mask=mask, other=0) if MASKED else tl.load(values + offsets)
    if KV == 2:
        # The bits of e4m3 are those of a float16 2^8 times as small, seven places lower.
        wide = x.to(tl.uint16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half * 256.0).to(dtype)
    return x.to(dtype)


@triton.jit
def _attend_tile(  # type: ignore[no-untyped-def]
    queries, limits, weighted, maxima, sums, start, end_key, table, k_cache, v_cache, k_scale, v_scale,
    block_stride, head_offset, scale_block_stride, scale_head_offset, score_scale, window, softcap,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, KV: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the running maxima, sums and weighted values of all lanes (scores in powers of two)."""
    dtype: tl.constexpr = tl.float32 if CAST else queries.dtype
    d = tl.arange(0, DIM)
    key = start + tl.arange(0, BLOCK_N)
    inside = key < end_key
    if MASKED:
        block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    else:
        block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
    slot = key % BLOCK_SIZE
    # What is past the end may be anything, NaN too: it is never read.
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    EDGE: tl.constexpr = MASKED or HEAD_DIM != DIM
    offsets = (block * block_stride + head_offset + slot * HEAD_DIM)[:, None] + d[None, :]
    k = _load_tile(k_cache, offsets, mask, EDGE, KV, dtype)
    scores = tl.dot(queries.to(dtype), tl.trans(k), input_precision="ieee") * score_scale
    if KV:
        scale_offsets = block * scale_block_stride + scale_head_offset + slot
        scores *= tl.load(k_scale + scale_offsets, mask=inside, other=0).to(tl.float32)[None, :]
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + e^2x); 2 * log2(e) = 2.885.
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.8853900817779268 / softcap))))
    if MASKED:
        visible = (key[None, :] < limits[:, None]) & inside[None, :]
        if WINDOW:
            visible &= key[None, :] >= limits[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(maxima, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(maxima - base)
    sums = sums * shrink + tl.sum(weights, 1)
    if KV:
        weights *= tl.load(v_scale + scale_offsets, mask=inside, other=0).to(tl.float32)[None, :]
    v = _load_tile(v_cache, offsets, mask, EDGE, KV, dtype)
    weighted = tl.dot(weights.to(queries.dtype).to(dtype), v, weighted * shrink[:, None], input_precision="ieee")
    return weighted, highest, sums


# What differs from step to step must not have a kernel compiled for it.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["limits"])
def _attend_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, k_scale, v_scale, tables, limits, segments, out, partial, partial_lse,
    q_stride, table_stride, block_stride, head_stride, scale_block_stride, scale_head_stride, out_stride,
    score_scale, window, softcap,
    NUM_KV_HEADS: tl.constexpr, REPEATS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIELDS: tl.constexpr, KV: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """One segment and one KV head; lane = row * REPEATS + query head. SPLIT: leave the result for the merge."""
    kv_head = tl.program_id(0)
    segment = tl.program_id(1)
    first_row = tl.load(segments + segment * FIELDS)
    num_rows = tl.load(segments + segment * FIELDS + 1)
    table_row = tl.load(segments + segment * FIELDS + 2)
    first_key = tl.load(segments + segment * FIELDS + 3)
    end_key = tl.load(segments + segment * FIELDS + 4)
    if first_key >= end_key:
        return
    lane = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM)
    present = lane < num_rows * REPEATS
    row = (first_row + lane // REPEATS).to(tl.int64)
    head = kv_head * REPEATS + lane % REPEATS
    lane_mask = present[:, None] & (d < HEAD_DIM)[None, :]
    queries = tl.load(q + (row * q_stride + head * HEAD_DIM)[:, None] + d[None, :], mask=lane_mask, other=0.0)
    lane_limits = tl.load(limits + row, mask=present, other=0)
    table = tables + table_row.to(tl.int64) * table_stride
    head_offset = kv_head * head_stride
    scale_head_offset = kv_head * scale_head_stride

    weighted = tl.zeros([BLOCK_M, DIM], tl.float32)
    maxima = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    edge = first_key
    if not WINDOW:
        # Keys that every row sees, in whole tiles.
        seen = tl.minimum(tl.min(tl.where(present, lane_limits, 2147483647)), end_key)
        edge = first_key + tl.maximum(seen - first_key, 0) // BLOCK_N * BLOCK_N
        for start in range(first_key, edge, BLOCK_N):
            weighted, maxima, sums = _attend_tile(
                queries, lane_limits, weighted, maxima, sums, start, end_key, table, k_cache, v_cache, k_scale,
                v_scale, block_stride, head_offset, scale_block_stride, scale_head_offset, score_scale, window,
                softcap, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, KV, WINDOW, SOFTCAP, False, CAST,
            )  # fmt: skip
    for start in range(edge, end_key, BLOCK_N):
        weighted, maxima, sums = _attend_tile(
            queries, lane_limits, weighted, maxima, sums, start, end_key, table, k_cache, v_cache, k_scale,
            v_scale, block_stride, head_offset, scale_block_stride, scale_head_offset, score_scale, window,
            softcap, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, KV, WINDOW, SOFTCAP, True, CAST,
        )  # fmt: skip

    # A lane that saw nothing here weighs nothing.
    seen_sums = tl.where(sums > 0, sums, 1.0)
    result = weighted / seen_sums[:, None]
    if SPLIT:
        place = (segment.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + lane
        tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], result, mask=lane_mask)
        tl.store(partial_lse + place, tl.where(sums > 0, maxima + tl.log2(seen_sums), float("-inf")), mask=present)
    else:
        place = (row * out_stride + head * HEAD_DIM)[:, None] + d[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=lane_mask)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    partial, partial_lse, ranges, out, out_stride,
    NUM_KV_HEADS: tl.constexpr, REPEATS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, FIELDS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One row and one query head: its segments' results by their log-sum-exp. A row without segments becomes 0."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    first_a = tl.load(ranges + row * FIELDS)
    num_a = tl.load(ranges + row * FIELDS + 1) - first_a
    lane_a = tl.load(ranges + row * FIELDS + 2) * REPEATS
    first_b = tl.load(ranges + row * FIELDS + 3)
    num_b = tl.load(ranges + row * FIELDS + 4) - first_b
    lane_b = tl.load(ranges + row * FIELDS + 5) * REPEATS
    d = tl.arange(0, DIM)
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([DIM], tl.float32)
    for first in range(0, num_a + num_b, AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)
        there = i < num_a + num_b
        segment = tl.where(i < num_a, first_a + i, first_b + i - num_a).to(tl.int64)
        lane = tl.where(i < num_a, lane_a, lane_b) + head % REPEATS
        place = (segment * NUM_KV_HEADS + head // REPEATS) * BLOCK_M + lane
        lse = tl.load(partial_lse + place, mask=there, other=float("-inf"))
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(lse - base)
        shrink = tl.exp2(highest - base)
        values = tl.load(
            partial + place[:, None] * HEAD_DIM + d[None, :],
            mask=there[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        weighted = weighted * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = new_highest
    result = weighted / tl.where(total > 0, total, 1.0)
    place = row.to(tl.int64) * out_stride + head * HEAD_DIM + d
    tl.store(out + place, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)


def attend_segments(
    q: Tensor,
    kv: LayerKV,
    tables: Tensor,
    limits: Tensor,
    plan: PlanTensors,
    config: TileConfig,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: Tensor,
) -> None:
    """Attend from rows of q [T, H, Dh] as the plan says, into out [T, H, Dh]; both may be views with a row stride.

    tables: int32 [rows, W]; limits: int32 [T], how many keys each row sees from the first one on
    """
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads, block_size = kv.k.shape[1], kv.k.shape[2]
    num_segments, dim = plan.segments.shape[0], triton.next_power_of_2(head_dim)
    shape = {
        "NUM_KV_HEADS": num_kv_heads,
        "REPEATS": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "DIM": dim,
        "BLOCK_M": config.block_m,
    }
    partial, lse = out, plan.segments
    if plan.split:
        num_lanes = num_segments * num_kv_heads * config.block_m
        partial = torch.empty(num_lanes, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_lanes, dtype=torch.float32, device=q.device)
    scales = (kv.k, kv.v) if kv.k_scale is None or kv.v_scale is None else (kv.k_scale, kv.v_scale)
    _attend_kernel[(num_kv_heads, num_segments)](
        q,
        kv.k,
        kv.v,
        *scales,
        tables,
        limits,
        plan.segments,
        out,
        partial,
        lse,
        q.stride(0),
        tables.stride(0),
        kv.k.stride(0),
        kv.k.stride(1),
        scales[0].stride(0),
        scales[0].stride(1),
        out.stride(0),
        scale * LOG2_E,
        0 if window is None else window,
        0.0 if softcap is None else softcap * LOG2_E,
        **shape,
        BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n,
        FIELDS=SEGMENT_FIELDS,
        KV=KV_CODES.get(kv.format, 0),
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SPLIT=plan.split,
        CAST=CAST_BEFORE_DOT and q.dtype is not torch.float32,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if plan.split:
        _merge_kernel[(plan.ranges.shape[0], num_heads)](
            partial,
            lse,
            plan.ranges,
            out,
            out.stride(0),
            **shape,
            FIELDS=RANGE_FIELDS,
            AT_ONCE=MERGED_AT_ONCE,
            num_warps=4 if dim > 64 else 2,
        )
