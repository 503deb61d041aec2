"""The inner loop of CPU attention: a few keys against a few query heads, as numba intrinsics.

Query heads that share a kv head, of one row or of many, lie side by side in the lanes of vectors ("lanes" below):
queries [Dh, lanes], accumulated values [Dh, lanes]. Each key and value number is broadcast to all of them, so it is
read once however many candidates share it, and no sum ever runs across lanes.
Source: online softmax (arXiv:1805.02867), as in FlashAttention (arXiv:2205.14135), algorithm 1.
Bound by arithmetic from 8 lanes on: 4 * Dh operations a lane and key.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from localpaged.kernels.vector_ir import F32, HAS_AVX512, I32, I64, VectorBuilder, ir

# Lanes of one vector; 8 float32 fill an AVX2 register, and two such a cycle do as much as one of AVX-512.
WIDTH = 8
# Vectors of queries that a tile takes; with TILE_KEYS keys each, their scores fill the registers.
MAX_VECTORS = 3
MAX_LANES = WIDTH * MAX_VECTORS
TILE_KEYS = 8
PREFETCH_KEYS = 16 * TILE_KEYS

# Scores that the mask hides, and the maximum before any key; both lie below any real score, the first far below
# the second, so that its weight vanishes even where nothing else was seen.
HIDDEN_SCORE = -1e30
FIRST_MAXIMUM = -1e20


@intrinsic(prefer_literal=True)
def attend_tile(
    typing_context: Any,
    keys: Any,
    values: Any,
    first_key: Any,
    queries: Any,
    limits: Any,
    state: Any,
    head_size: Any,
    softcap: Any,
    vectors: Any,
    capped: Any,
) -> Any:
    """Add TILE_KEYS keys to the running softmax of vectors * WIDTH lanes; all but the last four are addresses.

    keys, values: of TILE_KEYS int64 addresses, one a key; a key that no lane sees must still be readable
    first_key: position of the first key; the others follow
    queries: float32 [Dh, lanes], scaled
    limits: int32 [2, lanes], the positions [from, to) that a lane sees
    state: float32 [2 + Dh, lanes], maximum, sum of weights, weighted values
    softcap: float32, used where capped is 1
    """
    signature = types.void(*([types.intp] * 7), types.float32, vectors, capped)
    num_vectors, with_cap = vectors.literal_value, capped.literal_value
    lane_bytes = 4 * WIDTH * num_vectors

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = VectorBuilder(builder)
        keys, values, first_key, queries, limits, state, head_size, softcap = arguments[:8]
        many = range(num_vectors)

        def row(base: Any, index: Any) -> list[Any]:
            """Addresses of the vectors of row `index` of a [.., lanes] array."""
            start = builder.add(base, builder.mul(index, v.integer(lane_bytes)))
            return [v.offset(start, 4 * WIDTH * i) for i in many]

        def addresses(table: Any) -> list[Any]:
            return [v.load(v.offset(table, 8 * key), I64) for key in range(TILE_KEYS)]

        def broadcast(address: Any, index: Any) -> Any:
            return v.splat(v.load(builder.add(address, builder.mul(index, v.integer(4))), F32), WIDTH)

        zero = v.constant(F32, 0.0, WIDTH)
        scores: list[list[Any]] = []
        key_addresses = addresses(keys)
        # As many scores at a time as there are registers for.
        step = TILE_KEYS if HAS_AVX512 or num_vectors == 1 else 4
        for start in range(0, TILE_KEYS, step):
            some = key_addresses[start : start + step]

            def add_dimension(index: Any, sums: list[Any], some: list[Any] = some) -> list[Any]:
                query = [v.load(address, F32, WIDTH) for address in row(queries, index)]
                results = []
                for i, address in enumerate(some):
                    key = broadcast(address, index)
                    results += [v.fma(key, query[j], sums[i * num_vectors + j]) for j in many]
                return results

            sums = v.loop(head_size, [zero] * (len(some) * num_vectors), add_dimension)
            scores += [sums[i * num_vectors : (i + 1) * num_vectors] for i in range(len(some))]

        seen_from = [v.load(address, I32, WIDTH) for address in row(limits, v.integer(0))]
        seen_to = [v.load(address, I32, WIDTH) for address in row(limits, v.integer(1))]
        position = builder.trunc(first_key, I32)
        hidden = v.constant(F32, HIDDEN_SCORE, WIDTH)
        for key in range(TILE_KEYS):
            here = v.splat(builder.add(position, ir.Constant(I32, key)), WIDTH)
            for j in many:
                score = scores[key][j]
                if with_cap:
                    cap = v.splat(softcap, WIDTH)
                    score = builder.fmul(cap, v.tanh(builder.fdiv(score, cap)))
                visible = builder.and_(
                    builder.icmp_signed(">=", here, seen_from[j]), builder.icmp_signed("<", here, seen_to[j])
                )
                scores[key][j] = builder.select(visible, score, hidden)

        maxima, sums = row(state, v.integer(0)), row(state, v.integer(1))
        decay = []
        for j in many:
            old = v.load(maxima[j], F32, WIDTH)
            new = old
            for key in range(TILE_KEYS):
                new = v.maximum(new, scores[key][j])
            v.store(new, maxima[j])
            decay.append(v.exp(builder.fsub(old, new)))
            total = builder.fmul(v.load(sums[j], F32, WIDTH), decay[j])
            for key in range(TILE_KEYS):
                scores[key][j] = v.exp(builder.fsub(scores[key][j], new))
                total = builder.fadd(total, scores[key][j])
            v.store(total, sums[j])

        weighted = v.offset(state, 2 * lane_bytes)
        value_addresses = addresses(values)

        def add_values(index: Any, carried: list[Any]) -> list[Any]:
            targets = row(weighted, index)
            results = [builder.fmul(v.load(target, F32, WIDTH), decay[j]) for j, target in enumerate(targets)]
            for key, address in enumerate(value_addresses):
                value = broadcast(address, index)
                results = [v.fma(value, scores[key][j], results[j]) for j in many]
            for result, target in zip(results, targets, strict=True):
                v.store(result, target)
            return []

        v.loop(head_size, [], add_values)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        VectorBuilder(builder).prefetch(arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@njit(cache=True)
def gather_queries(q, first_row, repeats, kv_head, first_lane, num_lanes, scale, queries):  # type: ignore[no-untyped-def]
    """Scaled queries of lanes first_lane, first_lane + 1, ... -> queries float32 [Dh, lanes], zero past num_lanes.

    Lane i is row first_row + i // repeats of q [rows, H, Dh], head kv_head * repeats + i % repeats.
    """
    head_size = q.shape[2]
    queries[:] = 0
    for lane in range(num_lanes):
        row = first_row + (first_lane + lane) // repeats
        head = kv_head * repeats + (first_lane + lane) % repeats
        for d in range(head_size):
            queries[d, lane] = q[row, head, d] * scale


@njit(cache=True)
def tile_addresses(k_cache, v_cache, block_table, kv_head, first, end, keys, values):  # type: ignore[no-untyped-def]
    """Write the addresses of the TILE_KEYS keys from position `first` on and of their values; none lies past `end`."""
    block_size, head_size = k_cache.shape[2], k_cache.shape[3]
    key_bytes = 4 * head_size
    block, slot = first // block_size, first % block_size
    for i in range(TILE_KEYS):
        if first + i < end:
            offset = block_table[block] * k_cache.strides[0] + kv_head * k_cache.strides[1] + slot * key_bytes
            keys[i] = k_cache.ctypes.data + offset
            values[i] = v_cache.ctypes.data + offset
            slot += 1
            if slot == block_size:
                slot = 0
                block += 1
        else:
            # Slots past the end may hold anything, NaN too: read a key that exists, the mask hides it.
            keys[i] = keys[0]
            values[i] = values[0]
    # A block's keys of one head may be just one page, so the hardware does not foresee the next ones.
    ahead = first + PREFETCH_KEYS
    if ahead < end:
        offset = block_table[ahead // block_size] * k_cache.strides[0] + kv_head * k_cache.strides[1]
        offset += (ahead % block_size) * key_bytes
        for line in range(0, TILE_KEYS * key_bytes, 64):
            _prefetch(k_cache.ctypes.data + offset + line)
            _prefetch(v_cache.ctypes.data + offset + line)


@njit(cache=True)
def attend_range(  # type: ignore[no-untyped-def]
    k_cache, v_cache, block_table, kv_head, start, end, queries, limits, state, softcap
):
    """Add the keys at positions [start, end) of one sequence to the lanes' running softmax.

    k_cache, v_cache: [num_blocks, Hkv, block_size, Dh]; block_table: int32 [W]
    queries: float32 [Dh, lanes]; limits: int32 [2, lanes], none past end; state: float32 [2 + Dh, lanes]
    softcap: 0 where scores are not capped
    """
    head_size = k_cache.shape[3]
    vectors = queries.shape[1] // WIDTH
    keys = np.empty(TILE_KEYS, np.int64)
    values = np.empty(TILE_KEYS, np.int64)
    for first in range(start, end, TILE_KEYS):
        tile_addresses(k_cache, v_cache, block_table, kv_head, first, end, keys, values)
        k, v, qa = keys.ctypes.data, values.ctypes.data, queries.ctypes.data
        la, sa = limits.ctypes.data, state.ctypes.data
        if softcap > 0:
            if vectors == 1:
                attend_tile(k, v, first, qa, la, sa, head_size, softcap, 1, 1)
            elif vectors == 2:
                attend_tile(k, v, first, qa, la, sa, head_size, softcap, 2, 1)
            else:
                attend_tile(k, v, first, qa, la, sa, head_size, softcap, 3, 1)
        elif vectors == 1:
            attend_tile(k, v, first, qa, la, sa, head_size, softcap, 1, 0)
        elif vectors == 2:
            attend_tile(k, v, first, qa, la, sa, head_size, softcap, 2, 0)
        else:
            attend_tile(k, v, first, qa, la, sa, head_size, softcap, 3, 0)
