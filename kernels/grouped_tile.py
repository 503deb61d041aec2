"""The inner loops of grouped_matmul.py, as numba intrinsics: rounding activations, and a tile of products.

A tile is a few rows of activations against one panel of LANES rows of the weight. Its activations are a list of
entries, each one group of columns in int16: most groups once, and those that int16 would round too much a second
time with what the rounding left.
Source: the block dot products of ggml (github.com/ggml-org/ggml, ggml-quants.c); the residual of what is rounded
as a second term, Ozaki et al. (doi.org/10.1007/s11075-011-9478-1).
Bound by arithmetic from about 4 rows on: two products for each vpmaddwd and vpaddd, or vpdpwssd.
"""

from typing import Any

from numba import types
from numba.extending import intrinsic

from localpaged.kernels.vector_ir import F16, F32, HAS_AVX512, I8, I16, I32, I64, VectorBuilder, ir

# Output columns of a panel: one vector of int32 sums.
LANES = 16
# Rows of x that one pass over a panel multiplies, limited by the vector registers that hold their sums.
MAX_TILE_ROWS = 16 if HAS_AVX512 else 4
# What a whole group of an unpacked panel is held as: int16 pairs and float32 scales.
UNPACKED = 16


@intrinsic(prefer_literal=True)
def group_peak(typing_context: Any, address: Any, group: Any) -> Any:
    """The largest absolute value of `group` float32 at an address."""
    size = group.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = VectorBuilder(builder)
        parts = [v.load(v.offset(arguments[0], 4 * LANES * i), F32, LANES) for i in range(size // LANES)]
        peak = v.call_unary("fabs", parts[0])
        for part in parts[1:]:
            peak = v.maximum(peak, v.call_unary("fabs", part))
        return v.reduce(peak, v.maximum)

    return types.float32(types.intp, group), codegen


@intrinsic(prefer_literal=True)
def quantize_group(
    typing_context: Any,
    x: Any,
    peak: Any,
    q: Any,
    scales: Any,
    pair_stride: Any,
    sum_offset: Any,
    rest: Any,
    group: Any,
) -> Any:
    """One group of an activation row at address x -> int16 pairs at q, pair_stride bytes apart.

    peak: the group's largest absolute value. The scale goes to address scales, the sum of what the group was
    rounded to sum_offset bytes further, and what rounding left to rest, float32.
    """
    signature = types.void(types.intp, types.float32, *([types.intp] * 5), group)
    size = group.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = VectorBuilder(builder)
        source, peak, target, scale_address, pair_stride, sum_offset, rest = arguments[:7]
        # A group of zeros must not divide by zero.
        smallest = ir.Constant(F32, 2.0**-100)
        largest = builder.select(builder.fcmp_ordered(">", peak, smallest), peak, smallest)
        inverse = v.splat(builder.fdiv(ir.Constant(F32, 32767.0), largest), LANES)
        step = builder.fmul(largest, ir.Constant(F32, 1.0 / 32767.0))
        minus_step = v.splat(builder.fneg(step), LANES)
        # The minimum must meet the same rounded values as q does: then what rounding adds is multiplied by the
        # weight, scale * q + minimum, and not by scale * q alone, which is larger. The sum of integers is exact.
        total = v.constant(F32, 0.0, LANES)
        for i in range(size // LANES):
            part = v.load(v.offset(source, 4 * LANES * i), F32, LANES)
            rounded = v.call_unary("rint", builder.fmul(part, inverse))
            total = builder.fadd(total, rounded)
            v.store(v.fma(rounded, minus_step, part), v.offset(rest, 4 * LANES * i))
            wide = builder.fptosi(rounded, ir.VectorType(I32, LANES))
            pairs = builder.bitcast(builder.trunc(wide, ir.VectorType(I16, LANES)), ir.VectorType(I32, LANES // 2))
            for pair in range(LANES // 2):
                distance = builder.mul(pair_stride, v.integer(i * LANES // 2 + pair))
                element = builder.extract_element(pairs, ir.Constant(I32, pair))
                v.store(element, builder.add(target, distance))
        v.store(step, scale_address)
        v.store(builder.fmul(v.reduce(total, builder.fadd), step), builder.add(scale_address, sum_offset))
        return context.get_dummy_value()

    return signature, codegen


def _weight_pairs(v: VectorBuilder, address: Any, first: int, count: int, bits: int) -> list[Any]:
    """Pairs of columns [first, first + count) of a group of the weight at address, as int16 [LANES, 2] each."""
    words = ir.VectorType(I16, 2 * LANES)
    if bits == UNPACKED:
        return [v.load(v.offset(address, 4 * LANES * i), I16, 2 * LANES) for i in range(first, first + count)]
    if bits == 8:
        loads = [v.load(v.offset(address, 2 * LANES * i), I8, 2 * LANES) for i in range(first, first + count)]
        return [v.ir.sext(load, words) for load in loads]
    pairs = []
    for i in range(first // 2, (first + count) // 2):
        both = v.ir.zext(v.load(v.offset(address, 2 * LANES * i), I8, 2 * LANES), words)
        pairs += [v.ir.and_(both, v.constant(I16, 15, 2 * LANES)), v.ir.lshr(both, v.constant(I16, 4, 2 * LANES))]
    return pairs


def _unrolled_pairs(rows: int) -> int:
    """Pairs of columns multiplied without a branch: LLVM moves all their loads up, and 16 registers then spill."""
    if HAS_AVX512:
        return 16
    return 8 if rows == 1 else 4


def _scale(v: VectorBuilder, address: Any, part: int, scale_bits: int) -> Any:
    """The scales (part 0) or the minima (part 1) of a group, float32 [LANES]."""
    if scale_bits == 32:
        return v.load(v.offset(address, 4 * LANES * part), F32, LANES)
    return v.ir.fpext(v.load(v.offset(address, 2 * LANES * part), F16, LANES), ir.VectorType(F32, LANES))


def group_bytes(bits: int, scale_bits: int, has_minimum: int, group: int) -> tuple[int, int]:
    """Bytes of one group of a panel: its integers, and its scales and minima."""
    return group * LANES * bits // 8, LANES * scale_bits // 8 * (2 if has_minimum else 1)


@intrinsic(prefer_literal=True)
def unpack_groups(
    typing_context: Any,
    weight: Any,
    scales: Any,
    to: Any,
    to_scales: Any,
    num_groups: Any,
    bits: Any,
    scale_bits: Any,
    has_minimum: Any,
    group: Any,
) -> Any:
    """num_groups groups of a panel, to int16 pairs and float32 scales; all but num_groups are addresses."""
    literals = (bits, scale_bits, has_minimum, group)
    signature = types.void(*([types.intp] * 5), *literals)
    width, scale_width, with_minimum, size = (literal.literal_value for literal in literals)
    q_bytes, scale_bytes = group_bytes(width, scale_width, with_minimum, size)
    to_q_bytes, to_scale_bytes = group_bytes(UNPACKED, 32, with_minimum, size)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = VectorBuilder(builder)
        weight, scales, to, to_scales, num_groups = arguments[:5]

        def unpack(index: Any, carried: list[Any]) -> list[Any]:
            for i, pair in enumerate(_weight_pairs(v, v.at(weight, index, q_bytes), 0, size // 2, width)):
                v.store(pair, v.offset(v.at(to, index, to_q_bytes), 4 * LANES * i))
            for part in range(2 if with_minimum else 1):
                scale = _scale(v, v.at(scales, index, scale_bytes), part, scale_width)
                v.store(scale, v.offset(v.at(to_scales, index, to_scale_bytes), 4 * LANES * part))
            return []

        v.loop(num_groups, [], unpack)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def multiply_tile(
    typing_context: Any,
    weight: Any,
    scales: Any,
    initial: Any,
    initial_stride: Any,
    groups: Any,
    x: Any,
    x_scales: Any,
    out: Any,
    out_stride: Any,
    num_entries: Any,
    tile_rows: Any,
    bits: Any,
    scale_bits: Any,
    has_minimum: Any,
    group: Any,
) -> Any:
    """Add tile_rows rows of x times one panel of LANES weight rows to initial; all addresses, strides in bytes.

    initial, out: float32 [tile_rows, LANES]
    groups: int32 [num_entries], the weight's group that each entry is multiplied by
    x: int16 [num_entries, group/2, tile_rows, 2]; x_scales: float32 [num_entries, 2, tile_rows], scales and sums
    """
    literals = (tile_rows, bits, scale_bits, has_minimum, group)
    signature = types.void(*([types.intp] * 10), *literals)
    rows, width, scale_width, with_minimum, size = (literal.literal_value for literal in literals)
    q_bytes, scale_bytes = group_bytes(width, scale_width, with_minimum, size)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = VectorBuilder(builder)
        weight, scales, initial, initial_stride, groups, x, x_scales, out, out_stride, num_entries = arguments[:10]
        words = ir.VectorType(I16, 2 * LANES)
        floats = ir.VectorType(F32, LANES)
        # Few rows take two chains of sums each, to hide the latency of the additions.
        chains = 2 if rows <= 2 else 1
        unrolled = min(_unrolled_pairs(rows), size // 2)

        def add_entry(index: Any, sums: list[Any]) -> list[Any]:
            which = builder.sext(v.load(v.at(groups, index, 4), I32), I64)
            q = v.at(weight, which, q_bytes)
            x_entry = v.at(x, index, 2 * size * rows)

            def add_pairs(step: Any, integers: list[Any]) -> list[Any]:
                integers = list(integers)
                x_pairs = v.at(x_entry, step, 4 * rows * unrolled)
                for i, pair in enumerate(
                    _weight_pairs(v, v.at(q, step, LANES * unrolled * width // 4), 0, unrolled, width)
                ):
                    for row in range(rows):
                        x_pair = v.splat(v.load(v.offset(x_pairs, 4 * (i * rows + row)), I32), LANES)
                        product = v.pair_dot(pair, builder.bitcast(x_pair, words))
                        chain = row * chains + i % chains
                        integers[chain] = builder.add(integers[chain], product)
                return integers

            zeros = [v.constant(I32, 0, LANES)] * (rows * chains)
            if unrolled == size // 2:
                integers = add_pairs(v.integer(0), zeros)
            else:
                integers = v.loop(v.integer(size // 2 // unrolled), zeros, add_pairs)
            scale_address = v.at(scales, which, scale_bytes)
            scale = _scale(v, scale_address, 0, scale_width)
            x_scale_address = v.at(x_scales, index, 8 * rows)
            results = []
            for row in range(rows):
                total = integers[row * chains]
                if chains == 2:
                    total = builder.add(total, integers[row * chains + 1])
                x_scale = v.splat(v.load(v.offset(x_scale_address, 4 * row), F32), LANES)
                result = v.fma(builder.fmul(builder.sitofp(total, floats), x_scale), scale, sums[row])
                if with_minimum:
                    x_sum = v.splat(v.load(v.offset(x_scale_address, 4 * (rows + row)), F32), LANES)
                    result = v.fma(_scale(v, scale_address, 1, scale_width), x_sum, result)
                results.append(result)
            return results

        first = [v.load(v.at(initial, v.integer(row), initial_stride), F32, LANES) for row in range(rows)]
        for row, result in enumerate(v.loop(num_entries, first, add_entry)):
            v.store(result, v.at(out, v.integer(row), out_stride))
        return context.get_dummy_value()

    return signature, codegen
