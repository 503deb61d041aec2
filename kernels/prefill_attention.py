"""Prefill attention: chunks of query tokens against their paged context, causally.

q [T', H, Dh] x caches [num_blocks, Hkv, block_size, Dh] -> [T', H, Dh]; the chunks' own tokens are in
the cache already. Source: "Attention Is All You Need", section 3.2 (arXiv:1706.03762); FlashAttention
(arXiv:2205.14135) for the fused product.
Bound by arithmetic: 4 * H * Dh operations for each pair of a query and a key that it sees. Long chunks take
16-bit integers, whose products cost half (integer_attention_tile.py).
"""

from functools import cache
from itertools import pairwise

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from localpaged.kernels.attention_tile import FIRST_MAXIMUM, MAX_LANES, WIDTH, attend_range, gather_queries
from localpaged.kernels.dispatch import Implementation, implementation_for
from localpaged.kernels.float_row import float_row
from localpaged.kernels.integer_attention_tile import (
    LANES,
    STEP,
    TILE_KEYS,
    attend_first_key,
    attend_integer_tile,
    mean_key,
    pack_queries,
    pack_tile,
)
from localpaged.kernels.vector_ir import HAS_AVX2

# A window that nothing reaches, for attention without one.
NO_WINDOW = 2**31 - 1
# Chunks of at least so many tokens are worth the conversion of their context to integers, where the machine
# multiplies pairs of them at once. 512 tokens at the end of 2,000, two cores: 0.6 to 0.7 of the time of float32
# with AVX2 (vpmaddwd), half with AVX-512 (vpdpwssd).
INTEGER_TOKENS = 64 if HAS_AVX2 else NO_WINDOW
# A shorter context costs little in float32, and its few keys average out less of the integers' error.
INTEGER_CONTEXT = 1024


def prefill_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Gather each chunk's context through its block table and attend to it with a full score matrix."""
    block_size, repeats = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    bounds = starts.tolist()
    for chunk, context_len in enumerate(context_lens.tolist()):
        start, end = bounds[chunk], bounds[chunk + 1]
        token = torch.arange(context_len)
        blocks, offsets = block_tables[chunk, token // block_size].long(), token % block_size
        k = k_cache[blocks, :, offsets].float().repeat_interleave(repeats, dim=1)  # [context, H, Dh]
        v = v_cache[blocks, :, offsets].float().repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,chd->hqc", q[start:end].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(context_len - (end - start), context_len)[:, None]
        visible = token <= position
        if window is not None:
            visible &= token > position - window
        scores = scores.masked_fill(~visible, float("-inf"))
        out[start:end] = torch.einsum("hqc,chd->qhd", scores.softmax(-1), v)
    return out


@njit(cache=True)
def _list_units(starts, num_kv_heads, repeats, skipped):  # type: ignore[no-untyped-def]
    """Cut the chunks into units: MAX_LANES query heads of one kv head, token after token.

    skipped: bool [P], chunks that are not cut
    Returns int64 [units, 4]: chunk, kv head, first lane of the chunk, number of lanes.
    """
    count = 0
    for chunk in range(starts.shape[0] - 1):
        if skipped[chunk]:
            continue
        lanes = (starts[chunk + 1] - starts[chunk]) * repeats
        count += num_kv_heads * ((lanes + MAX_LANES - 1) // MAX_LANES)
    units = np.empty((count, 4), np.int64)
    count = 0
    for chunk in range(starts.shape[0] - 1):
        if skipped[chunk]:
            continue
        lanes = (starts[chunk + 1] - starts[chunk]) * repeats
        for kv_head in range(num_kv_heads):
            for lane in range(0, lanes, MAX_LANES):
                units[count, 0] = chunk
                units[count, 1] = kv_head
                units[count, 2] = lane
                units[count, 3] = min(MAX_LANES, lanes - lane)
                count += 1
    return units


@cache
def _kernel():  # type: ignore[no-untyped-def]
    """The kernel, compiled when first asked for."""

    @njit(
        "void(f4[:,:,:],f4[:,:,:,::1],f4[:,:,:,::1],i4[:,:],i4[:],i4[:],b1[:],f4,i8,f4,i8,f4[:,:,::1])",
        parallel=True,
        cache=True,
    )
    def kernel(  # type: ignore[no-untyped-def]
        q, k_cache, v_cache, tables, starts, lens, skipped, scale, window, softcap, num_threads, out
    ):
        num_kv_heads, head_size = k_cache.shape[1], k_cache.shape[3]
        repeats = q.shape[1] // num_kv_heads
        units = _list_units(starts, num_kv_heads, repeats, skipped)
        num_units = units.shape[0]
        for thread in prange(num_threads):
            # Later tokens see more keys, so threads take units in turn.
            for unit in range(thread, num_units, num_threads):
                chunk, kv_head, first_lane, lanes = units[unit]
                first_row, end_row = starts[chunk], starts[chunk + 1]
                width = (lanes + WIDTH - 1) // WIDTH * WIDTH
                state = np.zeros((2 + head_size, width), np.float32)
                state[0] = FIRST_MAXIMUM
                queries = np.empty((head_size, width), np.float32)
                limits = np.zeros((2, width), np.int32)
                gather_queries(q, first_row, repeats, kv_head, first_lane, lanes, scale, queries)
                before = lens[chunk] - (end_row - first_row)
                for lane in range(lanes):
                    length = before + (first_lane + lane) // repeats + 1
                    limits[0, lane] = max(0, length - window)
                    limits[1, lane] = length
                start, end = limits[0, 0], limits[1, lanes - 1]
                attend_range(k_cache, v_cache, tables[chunk], kv_head, start, end, queries, limits, state, softcap)
                for lane in range(lanes):
                    row = first_row + (first_lane + lane) // repeats
                    target = out[row, kv_head * repeats + (first_lane + lane) % repeats]
                    factor = np.float32(1) / state[1, lane]
                    for d in range(head_size):
                        target[d] = state[2 + d, lane] * factor

    return kernel


@cache
def _integer_kernel():  # type: ignore[no-untyped-def]
    """The kernel for one long chunk, compiled when first asked for."""

    @njit(
        "void(f4[:,:,:],f4[:,:,:,::1],f4[:,:,:,::1],i4[:],i8,f4,i8,i8,f4[:,:,::1])",
        parallel=True,
        cache=True,
    )
    def kernel(q, k_cache, v_cache, table, length, scale, window, num_threads, out):  # type: ignore[no-untyped-def]
        num_kv_heads, head_size = k_cache.shape[1], k_cache.shape[3]
        repeats = q.shape[1] // num_kv_heads
        num_lanes = q.shape[0] * repeats
        before = length - q.shape[0]
        first_tile = max(0, before + 1 - window) // TILE_KEYS
        num_tiles = (length + TILE_KEYS - 1) // TILE_KEYS
        num_units = (num_lanes + LANES - 1) // LANES
        keys = np.empty((num_tiles, TILE_KEYS, head_size), np.int16)
        key_scales = np.empty((num_tiles, TILE_KEYS), np.float32)
        values = np.empty((num_tiles, TILE_KEYS // 2, head_size), np.int32)
        value_scales = np.empty((num_tiles, head_size), np.float32)
        mean = np.empty(head_size, np.float32)
        # One kv head after another: its context in int16 fits the second cache.
        for kv_head in range(num_kv_heads):
            start = first_tile * TILE_KEYS
            mean_key(k_cache, table, kv_head, max(start, 1), min(start + TILE_KEYS, length), mean)
            for tile in prange(first_tile, num_tiles):
                pack_tile(
                    k_cache,
                    v_cache,
                    table,
                    kv_head,
                    tile * TILE_KEYS,
                    length,
                    mean,
                    keys[tile],
                    key_scales[tile],
                    values[tile],
                    value_scales[tile],
                )
            for thread in prange(num_threads):
                state = np.empty((2 + head_size, LANES), np.float32)
                scratch = np.empty((TILE_KEYS, LANES), np.float32)
                queries = np.empty((head_size // 2, LANES, 2), np.int16)
                scales = np.empty(LANES, np.float32)
                limits = np.empty((2, LANES), np.int32)
                # Later tokens see more keys, so threads take units in turn.
                for unit in range(thread, num_units, num_threads):
                    first_lane = unit * LANES
                    lanes = min(LANES, num_lanes - first_lane)
                    state[0] = FIRST_MAXIMUM
                    state[1:] = 0
                    limits[:] = 0
                    pack_queries(q, 0, repeats, kv_head, first_lane, lanes, scale, queries, scales)
                    for lane in range(lanes):
                        row = (first_lane + lane) // repeats
                        end = before + row + 1
                        limits[0, lane] = max(0, end - window)
                        limits[1, lane] = end
                        if limits[0, lane] == 0:
                            head = kv_head * repeats + (first_lane + lane) % repeats
                            query = float_row(q.ctypes.data + row * q.strides[0] + head * q.strides[1], head_size)
                            first_key, first_value = k_cache[table[0], kv_head, 0], v_cache[table[0], kv_head, 0]
                            attend_first_key(query, first_key, first_value, mean, scale, state, lane)
                            limits[0, lane] = 1
                    for tile in range(limits[0, 0] // TILE_KEYS, (limits[1, lanes - 1] - 1) // TILE_KEYS + 1):
                        attend_integer_tile(
                            keys[tile].ctypes.data,
                            key_scales[tile].ctypes.data,
                            values[tile].ctypes.data,
                            value_scales[tile].ctypes.data,
                            tile * TILE_KEYS,
                            queries.ctypes.data,
                            scales.ctypes.data,
                            limits.ctypes.data,
                            state.ctypes.data,
                            scratch.ctypes.data,
                            head_size,
                        )
                    for lane in range(lanes):
                        row = (first_lane + lane) // repeats
                        target = out[row, kv_head * repeats + (first_lane + lane) % repeats]
                        factor = np.float32(1) / state[1, lane]
                        for d in range(head_size):
                            target[d] = state[2 + d, lane] * factor

    return kernel


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    exact: bool = False,
) -> Tensor:
    """Attend from the tokens of P chunks to their contexts, causally.

    q: [T', H, Dh], chunk after chunk
    k_cache, v_cache: [num_blocks, Hkv, block_size, Dh], the chunks' own tokens included
    block_tables: int32 [P, Wp]
    starts: int32 [P+1], each chunk's range in q's rows
    context_lens: int32 [P], context after the chunk, the chunk included
    window: a query at position p sees the keys in (p - window, p]
    softcap: scores become softcap * tanh(score / softcap)
    exact: float32 products throughout, where otherwise long chunks are multiplied in 16-bit integers
    Returns [T', H, Dh]. Raises ValueError when the shapes do not fit.
    """
    if q.shape[1] % k_cache.shape[1] or q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a cache {tuple(k_cache.shape)}")
    if starts.shape[0] != context_lens.shape[0] + 1 or block_tables.shape[0] != context_lens.shape[0]:
        raise ValueError(
            f"{context_lens.shape[0]} chunks need as many block tables ({block_tables.shape[0]}) "
            f"and one more start ({starts.shape[0]})"
        )
    if q.shape[0] == 0:
        return torch.empty_like(q)
    if implementation_for(q) is not Implementation.NUMBA:
        return prefill_attention_reference(
            q, k_cache, v_cache, block_tables, starts, context_lens, scale=scale, window=window, softcap=softcap
        )
    out = torch.empty(q.shape)
    fits = not exact and softcap is None and q.shape[2] % STEP == 0 and q.stride(2) == 1
    if fits and INTEGER_TOKENS < NO_WINDOW:
        # Compiled with the first chunk of any length, which is the engine's warm-up.
        _integer_kernel()
    bounds = starts.tolist()
    in_integers = np.array(
        [
            fits and end - start >= INTEGER_TOKENS and length >= INTEGER_CONTEXT
            for (start, end), length in zip(pairwise(bounds), context_lens.tolist(), strict=True)
        ]
    )
    for chunk, is_integer in enumerate(in_integers):
        if is_integer:
            rows = slice(bounds[chunk], bounds[chunk + 1])
            _integer_kernel()(
                q[rows].numpy(),
                k_cache.numpy(),
                v_cache.numpy(),
                block_tables[chunk].numpy(),
                int(context_lens[chunk]),
                scale,
                NO_WINDOW if window is None else window,
                numba.get_num_threads(),
                out[rows].numpy(),
            )
    if in_integers.all():
        return out
    _kernel()(
        q.numpy(),
        k_cache.numpy(),
        v_cache.numpy(),
        block_tables.numpy(),
        starts.numpy(),
        context_lens.numpy(),
        in_integers,
        scale,
        NO_WINDOW if window is None else window,
        0.0 if softcap is None else softcap,
        numba.get_num_threads(),
        out.numpy(),
    )
    return out
