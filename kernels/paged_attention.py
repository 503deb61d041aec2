"""Decode attention: one query token a row against its paged context, shared blocks of a group read once.

q [D, H, Dh] x caches [num_blocks, Hkv, block_size, Dh] -> [D, H, Dh]; H is a multiple of Hkv.
A group's rows have their first `group_shared_blocks` blocks in common. These are read once for all of them
(prefix partial), each row's other blocks separately (suffix partial), and the partials are merged by their
log-sum-exp.
Source: PagedAttention (arXiv:2309.06180), section 4.3; Hydragen (arXiv:2402.05099), section 3.2, for
the split into prefix and suffix; Flash-Decoding for the merge.
Bound by memory for one row, by arithmetic for large groups; the floor is 8 * Hkv * Dh bytes a context token
that is read, and 4 * D * H * Dh operations a context token.
"""

from functools import cache

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from localpaged.kernels.attention_row import MAX_HEADS, attend_row
from localpaged.kernels.attention_tile import (
    FIRST_MAXIMUM,
    MAX_LANES,
    TILE_KEYS,
    WIDTH,
    attend_range,
    gather_queries,
)
from localpaged.kernels.dispatch import Implementation, implementation_for
from localpaged.kernels.host_array import lasting_array

# A window that nothing reaches, for attention without one.
NO_WINDOW = 2**31 - 1


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Gather each row's context through its block table and attend to it, with no use of sharing."""
    block_size, repeats = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    for row, context_len in enumerate(context_lens.tolist()):
        first = 0 if window is None else max(0, context_len - window)
        token = torch.arange(first, context_len)
        blocks, offsets = block_tables[row, token // block_size].long(), token % block_size
        k = k_cache[blocks, :, offsets].float().repeat_interleave(repeats, dim=1)  # [context, H, Dh]
        v = v_cache[blocks, :, offsets].float().repeat_interleave(repeats, dim=1)
        scores = torch.einsum("hd,chd->hc", q[row].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out[row] = torch.einsum("hc,chd->hd", scores.softmax(-1), v)
    return out


@njit(cache=True)
def _list_units(lens, group_starts, shared_blocks, block_size, num_kv_heads, repeats, window):  # type: ignore[no-untyped-def]
    """Cut the step into units: some lanes that attend to one range of keys through one block table.

    Returns int64 [units, 6]: first row, first lane, number of lanes, kv head, first key, end of keys; and the cost
    of all units before each, int64 [units + 1], in vectors times keys.
    """
    num_rows = lens.shape[0]
    chunks = (repeats + MAX_LANES - 1) // MAX_LANES
    most = num_rows * num_kv_heads * (chunks + repeats)
    units = np.empty((most, 6), np.int64)
    cost = np.zeros(most + 1, np.int64)
    count = 0
    for group in range(group_starts.shape[0] - 1):
        first_row, end_row = group_starts[group], group_starts[group + 1]
        shared = shared_blocks[group] * block_size if end_row - first_row > 1 else 0
        for kv_head in range(num_kv_heads):
            # The prefix that the group shares, for the lanes of all its rows; then each row's own keys.
            for row in range(first_row - 1, end_row):
                if row < first_row:
                    first, num_lanes, end = first_row, (end_row - first_row) * repeats, shared
                    start = shared
                    for member in range(first_row, end_row):
                        start = min(start, max(0, lens[member] - window))
                else:
                    first, num_lanes, end = row, repeats, lens[row]
                    start = max(shared, end - window)
                if start >= end:
                    continue
                for lane in range(0, num_lanes, MAX_LANES):
                    lanes = min(MAX_LANES, num_lanes - lane)
                    units[count, 0] = first
                    units[count, 1] = lane
                    units[count, 2] = lanes
                    units[count, 3] = kv_head
                    units[count, 4] = start
                    units[count, 5] = end
                    vectors = (lanes + WIDTH - 1) // WIDTH
                    cost[count + 1] = cost[count] + vectors * (end - start)
                    count += 1
    return units[:count], cost[: count + 1]


@njit(cache=True)
def _split(unit, cost, boundary, start, end):  # type: ignore[no-untyped-def]
    """The key of a unit at which a thread's share that ends at cost `boundary` ends, on a whole tile."""
    if boundary <= cost[unit]:
        return start
    if boundary >= cost[unit + 1]:
        return end
    keys = (boundary - cost[unit]) * (end - start) // (cost[unit + 1] - cost[unit])
    return start + keys // TILE_KEYS * TILE_KEYS


@cache
def _kernel():  # type: ignore[no-untyped-def]
    """The kernel, compiled when first asked for."""

    @njit(
        "void(f4[:,:,:],f4[:,:,:,::1],f4[:,:,:,::1],i4[:,:],i4[:],i4[:],i4[:],f4,i8,f4,i8,f4[:,:,:])",
        parallel=True,
        cache=True,
    )
    def kernel(  # type: ignore[no-untyped-def]
        q, k_cache, v_cache, tables, lens, group_starts, shared_blocks, scale, window, softcap, num_threads, out
    ):
        num_kv_heads, block_size, head_size = k_cache.shape[1:]
        repeats = q.shape[1] // num_kv_heads
        units, cost = _list_units(lens, group_starts, shared_blocks, block_size, num_kv_heads, repeats, window)
        num_units = units.shape[0]
        total = cost[num_units]
        # Threads take equal costs in order, so unit + thread numbers the pieces without gaps or clashes.
        states = np.empty((num_units + num_threads, (2 + head_size) * MAX_LANES), np.float32)
        for thread in prange(num_threads):
            from_cost, to_cost = total * thread // num_threads, total * (thread + 1) // num_threads
            for unit in range(num_units):
                if cost[unit + 1] <= from_cost or cost[unit] >= to_cost:
                    continue
                first_row, first_lane, lanes, kv_head, start, end = units[unit]
                first = _split(unit, cost, from_cost, start, end)
                last = _split(unit, cost, to_cost, start, end)
                width = (lanes + WIDTH - 1) // WIDTH * WIDTH
                state = states[unit + thread, : (2 + head_size) * width].reshape(2 + head_size, width)
                state[0] = FIRST_MAXIMUM
                state[1:] = 0
                if first >= last:
                    continue
                row, head = first_row + first_lane // repeats, kv_head * repeats + first_lane % repeats
                one_row = first_row + (first_lane + lanes - 1) // repeats == row
                if one_row and lanes <= MAX_HEADS and head_size % WIDTH == 0:
                    queries = np.empty((lanes, head_size), np.float32)
                    for lane in range(lanes):
                        for d in range(head_size):
                            queries[lane, d] = q[row, head + lane, d] * scale
                    hidden = max(0, lens[row] - window)
                    attend_row(k_cache, v_cache, tables[row], kv_head, first, last, queries, hidden, softcap, state)
                    continue
                queries = np.empty((head_size, width), np.float32)
                limits = np.zeros((2, width), np.int32)
                gather_queries(q, first_row, repeats, kv_head, first_lane, lanes, scale, queries)
                for lane in range(lanes):
                    length = lens[first_row + (first_lane + lane) // repeats]
                    limits[0, lane] = max(0, length - window)
                    limits[1, lane] = min(length, last)
                attend_range(k_cache, v_cache, tables[first_row], kv_head, first, last, queries, limits, state, softcap)
        _merge(units, cost, states, num_threads, repeats, out)

    return kernel


@njit(cache=True, fastmath={"contract", "reassoc"})
def _merge(units, cost, states, num_threads, repeats, out):  # type: ignore[no-untyped-def]
    """Combine the partial results of each row and head by their log-sum-exp into out [D, H, Dh]."""
    num_rows, num_heads, head_size = out.shape
    num_units = units.shape[0]
    maxima = np.full((num_rows, num_heads), FIRST_MAXIMUM, np.float32)
    sums = np.zeros((num_rows, num_heads), np.float32)
    out[:] = 0
    total = cost[num_units]
    for thread in range(num_threads):
        from_cost, to_cost = total * thread // num_threads, total * (thread + 1) // num_threads
        for unit in range(num_units):
            if cost[unit + 1] <= from_cost or cost[unit] >= to_cost:
                continue
            first_row, first_lane, lanes, kv_head, start, end = units[unit]
            width = (lanes + WIDTH - 1) // WIDTH * WIDTH
            state = states[unit + thread, : (2 + head_size) * width].reshape(2 + head_size, width)
            for lane in range(lanes):
                row = first_row + (first_lane + lane) // repeats
                head = kv_head * repeats + (first_lane + lane) % repeats
                maximum = max(maxima[row, head], state[0, lane])
                old = np.exp(maxima[row, head] - maximum)
                new = np.exp(state[0, lane] - maximum)
                maxima[row, head] = maximum
                sums[row, head] = sums[row, head] * old + state[1, lane] * new
                target = out[row, head]
                for d in range(head_size):
                    target[d] = target[d] * old + state[2 + d, lane] * new
    for row in range(num_rows):
        for head in range(num_heads):
            out[row, head] *= np.float32(1) / sums[row, head]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    group_starts: Tensor,
    group_shared_blocks: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from each row's one query to its context.

    q: [D, H, Dh]
    k_cache, v_cache: [num_blocks, Hkv, block_size, Dh]
    block_tables: int32 [D, W]
    context_lens: int32 [D], the query's own token included, at least 1
    group_starts: int32 [G+1]; group_shared_blocks: int32 [G], leading full blocks in common
    window: a query at position p sees the keys in (p - window, p]
    softcap: scores become softcap * tanh(score / softcap)
    Returns [D, H, Dh], in `out` when it is given. Raises ValueError when the shapes do not fit.
    """
    if q.shape[1] % k_cache.shape[1] or q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a cache {tuple(k_cache.shape)}")
    if block_tables.shape[0] != q.shape[0] or context_lens.shape[0] != q.shape[0]:
        raise ValueError(
            f"{q.shape[0]} rows need as many block tables ({block_tables.shape[0]}) "
            f"and context lengths ({context_lens.shape[0]})"
        )
    if out is None:
        out = torch.empty_like(q)
    if q.shape[0] == 0:
        return out
    if implementation_for(q) is not Implementation.NUMBA:
        reference = paged_attention_reference(
            q, k_cache, v_cache, block_tables, context_lens, scale=scale, window=window, softcap=softcap
        )
        return out.copy_(reference)
    _kernel()(
        q.numpy(),
        lasting_array(k_cache),
        lasting_array(v_cache),
        lasting_array(block_tables),
        lasting_array(context_lens),
        lasting_array(group_starts),
        lasting_array(group_shared_blocks),
        scale,
        NO_WINDOW if window is None else window,
        0.0 if softcap is None else softcap,
        numba.get_num_threads(),
        out.numpy(),
    )
    return out
