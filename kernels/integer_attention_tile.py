"""The inner loop of prefill attention in 16-bit integers: a tile of keys against many query heads.

Queries, keys, weights and values become int16, their products are summed exactly in int32 over a head or a tile
and then added up in float32: vpdpwssd does twice the products of a float32 FMA. Query heads that share a kv head
lie side by side in the lanes of vectors, as in attention_tile.py.
Rounding: each number of a query or key by at most 2^-16 of its vector's length; each weight of a tile by 2^-18 of
their sum or 2^-16 of the largest, whichever is more; each value by 2^-15 of the largest in its tile and dimension.
Source: online softmax (arXiv:1805.02867); integer products of quantised Q and K, SageAttention (arXiv:2410.02367).
Bound by arithmetic: 4 * Dh operations a lane and key.
"""

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from localpaged.kernels.float_row import float_row
from localpaged.kernels.vector_ir import F32, HAS_AVX512, I16, I32, VectorBuilder, ir

# Lanes of a vector, and vectors of queries in a tile; with STEP keys or dimensions their sums fill the registers.
WIDTH = 16 if HAS_AVX512 else 8
VECTORS = 3 if HAS_AVX512 else 4
LANES = WIDTH * VECTORS
STEP = 8 if HAS_AVX512 else 2
TILE_KEYS = 64

# |q . k| <= |q| |k|, so vectors no longer than this have products below 2^31, rounding included.
MOST_LENGTH = np.float32(46000)
MOST_ELEMENT = np.float32(32766)
# The sum of a tile's weights, rounded, times the largest value stays below 2^31.
MOST_WEIGHT = 32766.0
MOST_WEIGHTS = 131000.0
MOST_VALUE = np.float32(16383)
# Added to a small float32, it leaves the nearest integer in the low bits.
ROUNDING = 1.5 * 2.0**23

HIDDEN_SCORE = -1e30
FIRST_MAXIMUM = -1e20
# 2^r for |r| <= 1/2, relative error below 4e-6: less than most weights are rounded by.
EXP2 = (9.61012e-3, 5.550411e-2, 2.402265e-1, 6.931472e-1, 1.0)


@intrinsic
def attend_integer_tile(
    typing_context: Any,
    keys: Any,
    key_scales: Any,
    values: Any,
    value_scales: Any,
    first_key: Any,
    queries: Any,
    query_scales: Any,
    limits: Any,
    state: Any,
    scratch: Any,
    head_size: Any,
) -> Any:
    """Add TILE_KEYS keys to the running softmax of LANES lanes; all but first_key and head_size are addresses.

    keys: int16 [TILE_KEYS, Dh]; key_scales: float32 [TILE_KEYS]
    values: int16 [TILE_KEYS/2, Dh, 2], pairs of keys; value_scales: float32 [Dh], what an integer stands for
    first_key: position of the first key
    queries: int16 [Dh/2, LANES, 2]; query_scales: float32 [LANES], log2(e) and the scores' scale included
    limits: int32 [2, LANES], the positions [from, to) that a lane sees
    state: float32 [2 + Dh, LANES], maximum in bits, sum of weights, weighted values
    scratch: float32 [TILE_KEYS, LANES]
    """
    signature = types.void(*([types.intp] * 11))
    row_bytes = 4 * LANES

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = VectorBuilder(builder)
        keys, key_scales, values, value_scales, first_key, queries, query_scales, limits, state, scratch, head_size = (
            arguments
        )
        many = range(VECTORS)
        words = ir.VectorType(I16, 2 * WIDTH)
        integers, floats = ir.VectorType(I32, WIDTH), ir.VectorType(F32, WIDTH)

        def at(base: Any, index: Any, num_bytes: int) -> Any:
            return builder.add(base, builder.mul(index, v.integer(num_bytes)))

        def row(base: Any) -> list[Any]:
            """Addresses of the vectors of a row of LANES 4-byte elements."""
            return [v.offset(base, 4 * WIDTH * i) for i in many]

        def add_products(sums: list[Any], lanes: list[Any], pairs: list[Any]) -> list[Any]:
            """sums[i, j] plus the products of the pair at address pairs[i] with the pairs of lanes[j]."""
            results = []
            for i, address in enumerate(pairs):
                pair = builder.bitcast(v.splat(v.load(address, I32), WIDTH), words)
                results += [builder.add(sums[i * VECTORS + j], v.pair_dot(lanes[j], pair)) for j in many]
            return results

        zeros = [v.constant(I32, 0, WIDTH)] * (STEP * VECTORS)
        half_head = builder.lshr(head_size, v.integer(1))
        key_bytes = builder.shl(head_size, v.integer(1))
        seen_from = [v.load(address, I32, WIDTH) for address in row(limits)]
        seen_to = [v.load(address, I32, WIDTH) for address in row(v.offset(limits, row_bytes))]

        def add_scores(step: Any, before: list[Any]) -> list[Any]:
            maxima = list(before)
            first = builder.mul(step, v.integer(STEP))
            bases = [builder.add(keys, builder.mul(builder.add(first, v.integer(i)), key_bytes)) for i in range(STEP)]

            def add_pair(index: Any, sums: list[Any]) -> list[Any]:
                lanes = [v.load(address, I16, 2 * WIDTH) for address in row(at(queries, index, row_bytes))]
                return add_products(sums, lanes, [at(base, index, 4) for base in bases])

            sums = v.loop(half_head, zeros, add_pair)
            scales = [v.load(address, F32, WIDTH) for address in row(query_scales)]
            position = builder.trunc(builder.add(first_key, first), I32)
            for i in range(STEP):
                key = builder.add(first, v.integer(i))
                scale = v.splat(v.load(at(key_scales, key, 4), F32), WIDTH)
                here = v.splat(builder.add(position, ir.Constant(I32, i)), WIDTH)
                for j, target in enumerate(row(at(scratch, key, row_bytes))):
                    score = builder.fmul(builder.sitofp(sums[i * VECTORS + j], floats), builder.fmul(scale, scales[j]))
                    visible = builder.and_(
                        builder.icmp_signed(">=", here, seen_from[j]), builder.icmp_signed("<", here, seen_to[j])
                    )
                    score = builder.select(visible, score, v.constant(F32, HIDDEN_SCORE, WIDTH))
                    v.store(score, target)
                    maxima[j] = v.maximum(maxima[j], score)
            return maxima

        nothing = [v.constant(F32, FIRST_MAXIMUM, WIDTH)] * VECTORS
        tile_maxima = v.loop(v.integer(TILE_KEYS // STEP), nothing, add_scores)
        rounding = v.constant(F32, ROUNDING, WIDTH)

        def exp2(x: Any) -> Any:
            """2^x for x <= 0."""
            x = v.maximum(x, v.constant(F32, -100.0, WIDTH))
            shifted = builder.fadd(x, rounding)
            rest = builder.fsub(x, builder.fsub(shifted, rounding))
            power = v.constant(F32, EXP2[0], WIDTH)
            for coefficient in EXP2[1:]:
                power = v.fma(power, rest, v.constant(F32, coefficient, WIDTH))
            exponent = builder.shl(builder.bitcast(shifted, integers), v.constant(I32, 23, WIDTH))
            return builder.bitcast(builder.add(builder.bitcast(power, integers), exponent), floats)

        def add_weights(index: Any, sums: list[Any]) -> list[Any]:
            results = []
            for j, target in enumerate(row(at(scratch, index, row_bytes))):
                weight = exp2(builder.fsub(v.load(target, F32, WIDTH), tile_maxima[j]))
                v.store(weight, target)
                results.append(builder.fadd(sums[j], weight))
            return results

        zero = v.constant(F32, 0.0, WIDTH)
        sums = v.loop(v.integer(TILE_KEYS), [zero] * VECTORS, add_weights)
        # What a tile's weights, of which the largest is 1, are multiplied by to become integers.
        most, most_sum = v.constant(F32, MOST_WEIGHT, WIDTH), v.constant(F32, MOST_WEIGHTS, WIDTH)
        factors = []
        for total in sums:
            factor = builder.fdiv(most_sum, v.maximum(total, v.constant(F32, 1.0, WIDTH)))
            factors.append(builder.select(builder.fcmp_ordered("<", factor, most), factor, most))
        low_half, ones = v.constant(I32, 0xFFFF, WIDTH), v.constant(I16, 1, 2 * WIDTH)

        def round_weights(index: Any, totals: list[Any]) -> list[Any]:
            first = row(at(scratch, index, 2 * row_bytes))
            results = []
            for j, target in enumerate(row(at(scratch, index, row_bytes))):
                halves = [
                    builder.bitcast(v.fma(v.load(address, F32, WIDTH), factors[j], rounding), integers)
                    for address in (first[j], v.offset(first[j], row_bytes))
                ]
                high = builder.shl(halves[1], v.constant(I32, 16, WIDTH))
                pair = builder.or_(builder.and_(halves[0], low_half), high)
                results.append(builder.add(totals[j], v.pair_dot(builder.bitcast(pair, words), ones)))
                # Pair `index` takes the place of weights that are integers already.
                v.store(pair, target)
            return results

        totals = v.loop(v.integer(TILE_KEYS // 2), zeros[:VECTORS], round_weights)
        decays, scales_of_tile = [], []
        maxima, state_sums = row(state), row(v.offset(state, row_bytes))
        for j in many:
            old = v.load(maxima[j], F32, WIDTH)
            new = v.maximum(old, tile_maxima[j])
            v.store(new, maxima[j])
            decays.append(exp2(builder.fsub(old, new)))
            scale = builder.fdiv(exp2(builder.fsub(tile_maxima[j], new)), factors[j])
            scales_of_tile.append(scale)
            decayed = builder.fmul(v.load(state_sums[j], F32, WIDTH), decays[j])
            v.store(v.fma(builder.sitofp(totals[j], floats), scale, decayed), state_sums[j])

        def add_dimensions(step: Any, carried: list[Any]) -> list[Any]:
            first = builder.mul(step, v.integer(STEP))
            start = at(values, first, 4)
            pair_bytes = builder.shl(head_size, v.integer(2))

            def add_pair(index: Any, sums: list[Any]) -> list[Any]:
                lanes = [v.load(address, I16, 2 * WIDTH) for address in row(at(scratch, index, row_bytes))]
                pairs = builder.add(start, builder.mul(index, pair_bytes))
                return add_products(sums, lanes, [v.offset(pairs, 4 * i) for i in range(STEP)])

            sums = v.loop(v.integer(TILE_KEYS // 2), zeros, add_pair)
            targets = v.offset(at(state, first, row_bytes), 2 * row_bytes)
            for i in range(STEP):
                value_scale = v.splat(v.load(v.offset(at(value_scales, first, 4), 4 * i), F32), WIDTH)
                for j, target in enumerate(row(v.offset(targets, i * row_bytes))):
                    old = builder.fmul(v.load(target, F32, WIDTH), decays[j])
                    new = builder.fmul(builder.sitofp(sums[i * VECTORS + j], floats), value_scale)
                    v.store(v.fma(new, scales_of_tile[j], old), target)
            return []

        v.loop(builder.udiv(head_size, v.integer(STEP)), [], add_dimensions)
        return context.get_dummy_value()

    return signature, codegen


@njit(cache=True, fastmath={"contract", "reassoc"})
def _vector_scale(x):  # type: ignore[no-untyped-def]
    """What x [Dh] is multiplied by to fit int16 with products that fit int32."""
    square, largest = np.float32(0), np.float32(0)
    for d in range(x.shape[0]):
        square += x[d] * x[d]
        largest = max(largest, abs(x[d]))
    if largest < np.float32(1e-18):
        return np.float32(0)
    return min(MOST_ELEMENT / largest, MOST_LENGTH / np.sqrt(square))


@njit(cache=True)
def pack_queries(q, first_row, repeats, kv_head, first_lane, num_lanes, scale, queries, scales):  # type: ignore[no-untyped-def]
    """Queries of lanes first_lane, first_lane + 1, ... -> int16 [Dh/2, LANES, 2] and float32 [LANES].

    Lane i is row first_row + i // repeats of q [rows, H, Dh], head kv_head * repeats + i % repeats.
    """
    head_size = q.shape[2]
    queries[:] = 0
    scales[:] = 0
    for lane in range(num_lanes):
        row = first_row + (first_lane + lane) // repeats
        head = kv_head * repeats + (first_lane + lane) % repeats
        x = float_row(q.ctypes.data + row * q.strides[0] + head * q.strides[1], head_size)
        factor = _vector_scale(x)
        if factor > 0:
            scales[lane] = scale * np.float32(math.log2(math.e)) / factor
            for d in range(head_size):
                queries[d // 2, lane, d % 2] = np.int16(np.rint(x[d] * factor))


@njit(cache=True, fastmath={"contract", "reassoc"})
def attend_first_key(q, k, v, mean, scale, state, lane):  # type: ignore[no-untyped-def]
    """Begin a lane's running softmax with one key, in float32.

    q, k, v, mean: [Dh], the mean as in pack_tile; state: float32 [2 + Dh, LANES]
    The first token of a text takes most of the weight of many heads, and its value is small: as integers the
    others would be rounded by fractions of a weight near one.
    """
    score = np.float32(0)
    for d in range(q.shape[0]):
        score += q[d] * (k[d] - mean[d])
    state[0, lane] = score * scale * np.float32(math.log2(math.e))
    state[1, lane] = 1
    for d in range(q.shape[0]):
        state[2 + d, lane] = v[d]


@njit(cache=True)
def mean_key(k_cache, block_table, kv_head, start, end, mean):  # type: ignore[no-untyped-def]
    """The mean of a sequence's keys at [start, end), to mean [Dh]; zero when there are none."""
    mean[:] = 0
    for position in range(start, end):
        x = k_cache[block_table[position // k_cache.shape[2]], kv_head, position % k_cache.shape[2]]
        for d in range(mean.shape[0]):
            mean[d] += x[d] / np.float32(end - start)


@njit(cache=True, fastmath={"contract", "reassoc"})
def pack_tile(  # type: ignore[no-untyped-def]
    k_cache, v_cache, block_table, kv_head, first_key, end, mean, keys, key_scales, values, value_scales
):
    """The keys at [first_key, first_key + TILE_KEYS) of a sequence in the form of attend_integer_tile.

    mean: float32 [Dh], taken from every key: what all keys have in common changes no weight, and would be rounded
    keys: int16 [TILE_KEYS, Dh]; key_scales: float32 [TILE_KEYS]
    values: int32 [TILE_KEYS/2, Dh], pairs of int16; value_scales: float32 [Dh]
    Keys from end on become zeros, and their slots are not read.
    """
    block_size, head_size = k_cache.shape[2], k_cache.shape[3]
    stop = min(TILE_KEYS, end - first_key)
    value_scales[:] = np.float32(1e-18)
    for i in range(stop):
        block, slot = block_table[(first_key + i) // block_size], (first_key + i) % block_size
        x = k_cache[block, kv_head, slot] - mean
        factor = _vector_scale(x)
        key_scales[i] = np.float32(1) / factor if factor > 0 else np.float32(0)
        to = keys[i]
        for d in range(head_size):
            to[d] = np.int16(np.rint(x[d] * factor))
        value = v_cache[block, kv_head, slot]
        for d in range(head_size):
            value_scales[d] = max(value_scales[d], abs(value[d]))
    key_scales[stop:] = 0
    keys[stop:] = 0
    values[(stop + 1) // 2 :] = 0
    factors = MOST_VALUE / value_scales
    for d in range(head_size):
        value_scales[d] = value_scales[d] / MOST_VALUE
    for i in range(0, stop, 2):
        block, slot = block_table[(first_key + i) // block_size], (first_key + i) % block_size
        low, to = v_cache[block, kv_head, slot], values[i // 2]
        if i + 1 < stop:
            block, slot = block_table[(first_key + i + 1) // block_size], (first_key + i + 1) % block_size
            high = v_cache[block, kv_head, slot]
            for d in range(head_size):
                upper = np.int32(np.rint(high[d] * factors[d])) << np.int32(16)
                to[d] = (np.int32(np.rint(low[d] * factors[d])) & np.int32(0xFFFF)) | upper
        else:
            for d in range(head_size):
                to[d] = np.int32(np.rint(low[d] * factors[d])) & np.int32(0xFFFF)
