"""The Triton kernel of store_qkv.py."""

import triton
import triton.language as tl
from torch import Tensor

from localpaged.kernels.paged_kv import LayerKV
from localpaged.kernels.segment_attention_triton import KV_CODES

LEAST_SCALE = 2.0**-14
# So many halves of heads fill a warp's loads of 16 bytes a thread.
HEADS_AT_ONCE = 8


@triton.jit
def _store(x, place, mask, KV: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers, divided by their scale already where there is one, to the addresses place."""
    if KV == 0:
        tl.store(place, x.to(place.dtype.element_ty), mask=mask)
    elif KV == 1:
        # Rounded to the nearest, ties to even, by what a float32 of this size can hold.
        rounded = (x + 12582912.0) - 12582912.0
        tl.store(place, tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8), mask=mask)
    else:
        # Rounded to e4m3 in the bits of a float16 2^8 times as small, to the nearest, ties to even.
        small = tl.minimum(tl.maximum(x, -448.0), 448.0) * 0.00390625
        bits = small.to(tl.float16).to(tl.uint16, bitcast=True)
        magnitude = bits & 0x7FFF
        magnitude = (magnitude + 0x3F + ((magnitude >> 7) & 1)) >> 7
        tl.store(place, (magnitude | ((bits >> 8) & 0x80)).to(tl.uint8), mask=mask)


@triton.jit
def _store_qkv_kernel(  # type: ignore[no-untyped-def]
    qkv, k_cache, v_cache, k_scales, v_scales, slots, positions, cos, sin, q_weight, k_weight, eps, offset,
    token_stride, block_stride, head_stride, scale_block_stride, scale_head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr, HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, HEADS: tl.constexpr,
    ROTARY: tl.constexpr, NORM: tl.constexpr, KV: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, numbered queries, keys, values. Two halves that turn, and the rest that does not."""
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    there = head < NUM_HEADS + 2 * NUM_KV_HEADS
    half = tl.arange(0, HALF_WIDTH)
    left = tl.arange(0, REST_WIDTH)
    half_mask = there[:, None] & (half < HALF)[None, :]
    left_mask = there[:, None] & (left < REST)[None, :]
    base = qkv + token * token_stride + (head * HEAD_DIM)[:, None]
    first = tl.load(base + half[None, :], mask=half_mask, other=0.0).to(tl.float32)
    second = tl.load(base + HALF + half[None, :], mask=half_mask, other=0.0).to(tl.float32)
    if REST:
        rest = tl.load(base + 2 * HALF + left[None, :], mask=left_mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST:
            squares += tl.sum(rest * rest, 1)
        factor = tl.where(is_value, 1.0, 1.0 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
        first *= factor * _norm_weight(q_weight, k_weight, half, half < HALF, is_query, is_value, offset)
        second *= factor * _norm_weight(q_weight + HALF, k_weight + HALF, half, half < HALF, is_query, is_value, offset)
        if REST:
            rest *= factor * _norm_weight(
                q_weight + 2 * HALF, k_weight + 2 * HALF, left, left < REST, is_query, is_value, offset
            )
    if ROTARY:
        # Rows that pad a batch have position -1.
        angle = tl.maximum(tl.load(positions + token), 0).to(tl.int64) * HALF + half
        c = tl.load(cos + angle, mask=half < HALF, other=0.0)[None, :]
        s = tl.load(sin + angle, mask=half < HALF, other=0.0)[None, :]
        turned = first * c - second * s
        second = tl.where(is_value[:, None], second, second * c + first * s)
        first = tl.where(is_value[:, None], first, turned)
    element = qkv.dtype.element_ty
    tl.store(base + half[None, :], first.to(element), mask=half_mask & is_query[:, None])
    tl.store(base + HALF + half[None, :], second.to(element), mask=half_mask & is_query[:, None])
    if REST:
        tl.store(base + 2 * HALF + left[None, :], rest.to(element), mask=left_mask & is_query[:, None])
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    block = slot // BLOCK_SIZE
    place = block * block_stride + kv_head * head_stride + slot % BLOCK_SIZE * HEAD_DIM
    kept = there & (head >= NUM_HEADS)
    if KV:
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        if REST:
            largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
        scale = tl.maximum(largest / MOST, LEAST).to(tl.float16)
        scale_place = block * scale_block_stride + kv_head * scale_head_stride + slot % BLOCK_SIZE
        tl.store(k_scales + scale_place, scale, mask=kept & (head < NUM_HEADS + NUM_KV_HEADS))
        tl.store(v_scales + scale_place, scale, mask=kept & is_value)
        divisor = scale.to(tl.float32)[:, None]
        first /= divisor
        second /= divisor
        if REST:
            rest /= divisor
    kept = kept[:, None]
    is_value = is_value[:, None]
    for values in tl.static_range(2):
        cache = (v_cache if values else k_cache) + place[:, None]
        wanted = kept & (is_value if values else ~is_value)
        _store(first, cache + half[None, :], half_mask & wanted, KV)
        _store(second, cache + HALF + half[None, :], half_mask & wanted, KV)
        if REST:
            _store(rest, cache + 2 * HALF + left[None, :], left_mask & wanted, KV)


@triton.jit
def _norm_weight(q_weight, k_weight, i, mask, is_query, is_value, offset):  # type: ignore[no-untyped-def]
    """What each head's numbers are multiplied by, [heads, i]: its kind's weights, 1 for values."""
    of_query = tl.load(q_weight + i, mask=mask, other=0.0).to(tl.float32)[None, :]
    of_key = tl.load(k_weight + i, mask=mask, other=0.0).to(tl.float32)[None, :]
    weight = tl.where(is_query[:, None], of_query, of_key) + offset
    return tl.where(is_value[:, None], 1.0, weight)


def launch(
    qkv: Tensor,
    kv: LayerKV,
    slots: Tensor,
    positions: Tensor,
    table: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    unit_offset: bool,
) -> None:
    """Run the kernel; see store_qkv.store_qkv()."""
    from localpaged.kernels.store_qkv import MOST

    num_tokens, all_heads, head_dim = qkv.shape
    num_kv_heads, block_size = kv.k.shape[1], kv.k.shape[2]
    # Without a table the two halves are those of the head all the same.
    half = head_dim // 2 if table is None else table[0].shape[1]
    scales = (kv.k, kv.v) if kv.k_scale is None or kv.v_scale is None else (kv.k_scale, kv.v_scale)
    _store_qkv_kernel[(num_tokens, triton.cdiv(all_heads, HEADS_AT_ONCE))](
        qkv,
        kv.k,
        kv.v,
        *scales,
        slots,
        positions,
        *(table if table is not None else (positions, positions)),
        *(norms if norms is not None else (qkv, qkv)),
        eps,
        1.0 if unit_offset else 0.0,
        qkv.stride(0),
        kv.k.stride(0),
        kv.k.stride(1),
        scales[0].stride(0),
        scales[0].stride(1),
        NUM_HEADS=all_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HALF=half,
        HALF_WIDTH=triton.next_power_of_2(half),
        REST_WIDTH=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        HEADS=HEADS_AT_ONCE,
        ROTARY=table is not None,
        NORM=norms is not None,
        KV=KV_CODES.get(kv.format, 0),
        MOST=MOST.get(kv.format, 1.0),
        LEAST=LEAST_SCALE,
        num_warps=1,
    )
