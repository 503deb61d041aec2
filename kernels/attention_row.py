"""The inner loop of decode attention for few query heads: eight keys against the heads of one row.

A row that shares its keys with no other has only H / Hkv query heads a kv head. As lanes of a vector
(attention_tile.py) three heads would leave most of it empty, so here the lanes are the numbers of one key: a score is
a dot product over vectors, and the scores of eight keys fill one vector again.
Source: online softmax (arXiv:1805.02867), as in FlashAttention (arXiv:2205.14135), algorithm 1.
Bound by memory: 8 * Dh bytes and 4 * Dh operations a head for each key.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from localpaged.kernels.attention_tile import FIRST_MAXIMUM, HIDDEN_SCORE, TILE_KEYS, WIDTH, tile_addresses
from localpaged.kernels.vector_ir import F32, I32, I64, VectorBuilder, ir

# With more heads, lanes that are heads do less work.
MAX_HEADS = 4
# Sums that fit the 16 registers beside what they are made of.
MAX_SUMS = 12


@intrinsic(prefer_literal=True)
def _attend_keys(
    typing_context: Any,
    keys: Any,
    values: Any,
    first_key: Any,
    seen_from: Any,
    seen_to: Any,
    queries: Any,
    maxima: Any,
    sums: Any,
    weighted: Any,
    columns: Any,
    softcap: Any,
    heads: Any,
    capped: Any,
) -> Any:
    """Add TILE_KEYS keys to the running softmax of `heads` query heads; arrays come as addresses.

    keys, values: of TILE_KEYS int64 addresses, one a key; a key that is not seen must still be readable
    first_key: position of the first key; the others follow. Keys at [seen_from, seen_to) are seen
    queries: float32 [heads, Dh], scaled
    maxima: float32 [WIDTH], of which `heads` are used; sums: float32 [heads, WIDTH], of weights, one a key of the tile
    weighted: float32 [heads, Dh]; columns: Dh / WIDTH; softcap: float32, used where capped is 1
    """
    signature = types.void(*([types.intp] * 10), types.float32, heads, capped)
    num_heads, with_cap = heads.literal_value, capped.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = VectorBuilder(builder)
        keys, values, first_key, seen_from, seen_to, queries, maxima, sums, weighted, columns, softcap = arguments[:11]
        vector_bytes = 4 * WIDTH
        row_bytes = builder.mul(columns, v.integer(vector_bytes))
        query_rows, weighted_rows = (
            [v.at(base, v.integer(head), row_bytes) for head in range(num_heads)] for base in (queries, weighted)
        )

        def addresses(table: Any) -> list[Any]:
            return [v.load(v.offset(table, 8 * key), I64) for key in range(TILE_KEYS)]

        def column(base: Any, index: Any) -> Any:
            return v.load(v.at(base, index, vector_bytes), F32, WIDTH)

        # Products of each head (outer) and key, one number of the key a lane; neighbours are added up at once.
        zero = v.constant(F32, 0.0, WIDTH)
        partial: list[list[Any]] = [[] for _ in range(num_heads)]
        at_once = max(step for step in (2, 4, 8) if step * num_heads <= MAX_SUMS)
        key_addresses = addresses(keys)
        for start in range(0, TILE_KEYS, at_once):
            some = key_addresses[start : start + at_once]

            def add_column(index: Any, carried: list[Any], some: list[Any] = some) -> list[Any]:
                loaded = [column(address, index) for address in some]
                results = []
                for head, row in enumerate(query_rows):
                    query = column(row, index)
                    mine = carried[head * len(some) : (head + 1) * len(some)]
                    results += [v.fma(key, query, old) for key, old in zip(loaded, mine, strict=True)]
                return results

            products = v.loop(columns, [zero] * (num_heads * len(some)), add_column)
            for head in range(num_heads):
                mine = products[head * len(some) : (head + 1) * len(some)]
                partial[head] += [v.add_pairs(mine[i], mine[i + 1]) for i in range(0, len(some), 2)]

        position = v.splat(builder.trunc(first_key, I32), WIDTH)
        here = builder.add(position, ir.Constant(ir.VectorType(I32, WIDTH), list(range(TILE_KEYS))))
        visible = builder.and_(
            builder.icmp_signed(">=", here, v.splat(builder.trunc(seen_from, I32), WIDTH)),
            builder.icmp_signed("<", here, v.splat(builder.trunc(seen_to, I32), WIDTH)),
        )
        old = v.load(maxima, F32, WIDTH)
        new = old
        scores = []
        for head in range(num_heads):
            low, high = (v.add_pairs(*partial[head][i : i + 2]) for i in (0, 2))
            score = v.add_halves(low, high)
            if with_cap:
                cap = v.splat(softcap, WIDTH)
                score = builder.fmul(cap, v.tanh(builder.fdiv(score, cap)))
            score = builder.select(visible, score, v.constant(F32, HIDDEN_SCORE, WIDTH))
            scores.append(score)
            lane = ir.Constant(I32, head)
            highest = v.reduce(score, v.maximum)
            before = builder.extract_element(old, lane)
            new = builder.insert_element(
                new, builder.select(builder.fcmp_ordered(">", highest, before), highest, before), lane
            )
        v.store(new, maxima)
        decays = v.exp(builder.fsub(old, new))
        decay, weights = [], []
        for head in range(num_heads):
            weight = v.exp(builder.fsub(scores[head], v.spread(new, head)))
            decay.append(v.spread(decays, head))
            target = v.offset(sums, head * vector_bytes)
            v.store(v.fma(v.load(target, F32, WIDTH), decay[head], weight), target)
            weights.append([v.spread(weight, key) for key in range(TILE_KEYS)])

        value_addresses = addresses(values)

        def add_values(index: Any, carried: list[Any]) -> list[Any]:
            loaded = [column(address, index) for address in value_addresses]
            for head, row in enumerate(weighted_rows):
                result = builder.fmul(column(row, index), decay[head])
                for value, weight in zip(loaded, weights[head], strict=True):
                    result = v.fma(value, weight, result)
                v.store(result, v.at(row, index, vector_bytes))
            return []

        v.loop(columns, [], add_values)
        return context.get_dummy_value()

    return signature, codegen


@njit(cache=True)
def attend_row(  # type: ignore[no-untyped-def]
    k_cache, v_cache, block_table, kv_head, start, end, queries, seen_from, softcap, state
):
    """Attend from the heads of one row to the keys at positions [start, end) of its sequence.

    k_cache, v_cache: [num_blocks, Hkv, block_size, Dh], Dh a multiple of WIDTH; block_table: int32 [W]
    queries: float32 [heads, Dh], scaled, at most MAX_HEADS; keys before seen_from are hidden
    softcap: 0 where scores are not capped
    state: float32 [2 + Dh, lanes], written: maximum, sum of weights, weighted values of each head
    """
    heads, head_size = queries.shape
    keys = np.empty(TILE_KEYS, np.int64)
    values = np.empty(TILE_KEYS, np.int64)
    maxima = np.full(WIDTH, FIRST_MAXIMUM, np.float32)
    sums = np.zeros((heads, WIDTH), np.float32)
    weighted = np.zeros((heads, head_size), np.float32)
    k, v, q, m = keys.ctypes.data, values.ctypes.data, queries.ctypes.data, maxima.ctypes.data
    s, w, columns = sums.ctypes.data, weighted.ctypes.data, head_size // WIDTH
    for first in range(start, end, TILE_KEYS):
        tile_addresses(k_cache, v_cache, block_table, kv_head, first, end, keys, values)
        if softcap > 0:
            if heads == 1:
                _attend_keys(k, v, first, seen_from, end, q, m, s, w, columns, softcap, 1, 1)
            elif heads == 2:
                _attend_keys(k, v, first, seen_from, end, q, m, s, w, columns, softcap, 2, 1)
            elif heads == 3:
                _attend_keys(k, v, first, seen_from, end, q, m, s, w, columns, softcap, 3, 1)
            else:
                _attend_keys(k, v, first, seen_from, end, q, m, s, w, columns, softcap, 4, 1)
        elif heads == 1:
            _attend_keys(k, v, first, seen_from, end, q, m, s, w, columns, softcap, 1, 0)
        elif heads == 2:
            _attend_keys(k, v, first, seen_from, end, q, m, s, w, columns, softcap, 2, 0)
        elif heads == 3:
            _attend_keys(k, v, first, seen_from, end, q, m, s, w, columns, softcap, 3, 0)
        else:
            _attend_keys(k, v, first, seen_from, end, q, m, s, w, columns, softcap, 4, 0)
    for head in range(heads):
        state[0, head] = maxima[head]
        state[1, head] = sums[head].sum()
        for d in range(head_size):
            state[2 + d, head] = weighted[head, d]
