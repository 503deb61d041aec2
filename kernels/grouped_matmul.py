"""Activations times a grouped integer weight: int16 by int8 products, float32 in and out.

x float32 [M, K], weight [N, K] as scale * q + minimum per group of columns, bias [N] -> float32 [M, N].
Each group of an activation row becomes int16 with a float32 scale of its own (maximum / 32767): rounded by at
most 2^-16 of the group's maximum. The products are summed exactly in int32 over the group, the groups in
float32. The weights lose nothing.
Source: the block dot products of ggml (github.com/ggml-org/ggml, ggml-quants.c), with int16 in place of int8.
Bound by memory for up to about 4 rows: 5 bits a weight for 4-bit weights with a minimum, 8.5 for 8-bit ones
without. Beyond, by arithmetic: a vpdpwssd (or vpmaddwd and vpaddd) does twice the products of a float32 FMA.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import intrinsic
from torch import Tensor

from localpaged.kernels.grouped_weight import GroupedWeight
from localpaged.kernels.vector_ir import F16, F32, HAS_AVX512, I8, I16, I32, VectorBuilder, ir

# Output columns of a panel: one vector of int32 sums.
LANES = 16
# Rows of x that one pass over a panel multiplies, limited by the vector registers that hold their sums.
MAX_TILE_ROWS = 16 if HAS_AVX512 else 4


def grouped_matmul_reference(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times the dequantised weight [N, K] transposed, plus bias [N]."""
    return torch.nn.functional.linear(x, weight.dequantize(), bias)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A GroupedWeight in the order in which the kernel reads it: panels of LANES rows of the weight.

    q: uint8 [panels, ...]; for 8 bits pairs of columns [K/2, LANES, 2]; for 4 bits two such pairs in each
        byte, the first in the low half
    scales: float16 as int16 [panels, K/group, 1 or 2, LANES], the scales and, if there are any, the minima
    bias: float32 [panels * LANES]
    """

    q: np.ndarray
    scales: np.ndarray
    bias: np.ndarray
    shape: tuple[int, int]
    group: int
    bits: int
    has_minimum: bool


def pack_weight(weight: GroupedWeight, bias: Tensor | None = None) -> PackedWeight | None:
    """Reorder a weight for the kernel; None where that would round it (scales that float16 cannot hold)."""
    rows, columns = weight.q.shape
    q, scale, minimum = weight.q.numpy(), weight.scale.numpy(), weight.minimum
    low, high = int(q.min()), int(q.max())
    fits_4_bits = high - low < 16 and minimum is not None and low >= 0
    parts = [scale] if minimum is None else [scale, minimum.numpy()]
    halves = [part.astype(np.float16) for part in parts]
    if columns % weight.group or weight.group % 4 or low < -128 or high > 127:
        return None
    if any((half.astype(np.float32) != part).any() for half, part in zip(halves, parts, strict=True)):
        return None
    panels = -(-rows // LANES)
    padding = panels * LANES - rows
    padded = np.pad(q, ((0, padding), (0, 0)))
    by_pair = padded.reshape(panels, LANES, columns // 2, 2).transpose(0, 2, 1, 3)
    pairs = np.ascontiguousarray(by_pair).view(np.uint8).reshape(panels, columns // 2, 2 * LANES)
    if fits_4_bits:
        pairs = pairs[:, 0::2] | (pairs[:, 1::2] << np.uint8(4))
    stacked = np.stack([np.pad(half, ((0, padding), (0, 0))) for half in halves])
    scales = stacked.reshape(len(parts), panels, LANES, -1).transpose(1, 3, 0, 2)
    full_bias = np.zeros(panels * LANES, dtype=np.float32)
    if bias is not None:
        full_bias[:rows] = bias.numpy()
    return PackedWeight(
        np.ascontiguousarray(pairs).reshape(panels, -1),
        np.ascontiguousarray(scales).reshape(panels, -1).view(np.int16),
        full_bias,
        (rows, columns),
        weight.group,
        4 if fits_4_bits else 8,
        minimum is not None,
    )


@intrinsic(prefer_literal=True)
def _quantize_group(
    typing_context: Any, x: Any, q: Any, scales: Any, pair_stride: Any, sum_offset: Any, group: Any
) -> Any:
    """One group of an activation row at address x -> int16 pairs at q, pair_stride bytes apart.

    Its scale goes to address scales, the sum of what it was rounded to sum_offset bytes further.
    """
    signature = types.void(*([types.intp] * 5), group)
    size = group.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = VectorBuilder(builder)
        source, target, scale_address, pair_stride, sum_offset = arguments[:5]
        parts = [v.load(v.offset(source, 4 * LANES * i), F32, LANES) for i in range(size // LANES)]
        peak = v.call_unary("fabs", parts[0])
        for part in parts[1:]:
            peak = v.maximum(peak, v.call_unary("fabs", part))
        # A group of zeros must not divide by zero.
        largest = v.maximum(v.reduce(peak, v.maximum), ir.Constant(F32, 2.0**-100))
        inverse = v.splat(builder.fdiv(ir.Constant(F32, 32767.0), largest), LANES)
        # The minimum must meet the same rounded values as q does: then what rounding adds is multiplied by the
        # weight, scale * q + minimum, and not by scale * q alone, which is larger. The sum of integers is exact.
        total = v.constant(F32, 0.0, LANES)
        for i, part in enumerate(parts):
            rounded = v.call_unary("rint", builder.fmul(part, inverse))
            total = builder.fadd(total, rounded)
            wide = builder.fptosi(rounded, ir.VectorType(I32, LANES))
            pairs = builder.bitcast(builder.trunc(wide, ir.VectorType(I16, LANES)), ir.VectorType(I32, LANES // 2))
            for pair in range(LANES // 2):
                distance = builder.mul(pair_stride, v.integer(i * LANES // 2 + pair))
                element = builder.extract_element(pairs, ir.Constant(I32, pair))
                v.store(element, builder.add(target, distance))
        step = builder.fmul(largest, ir.Constant(F32, 1.0 / 32767.0))
        v.store(step, scale_address)
        v.store(builder.fmul(v.reduce(total, builder.fadd), step), builder.add(scale_address, sum_offset))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def _multiply_tile(
    typing_context: Any,
    weight: Any,
    scales: Any,
    bias: Any,
    x: Any,
    x_scales: Any,
    out: Any,
    out_stride: Any,
    num_groups: Any,
    tile_rows: Any,
    bits: Any,
    has_minimum: Any,
    group: Any,
) -> Any:
    """tile_rows rows of x times one panel of LANES weight rows; all addresses, strides in bytes."""
    literals = (tile_rows, bits, has_minimum, group)
    signature = types.void(*([types.intp] * 8), *literals)
    rows, width, with_minimum, size = (literal.literal_value for literal in literals)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = VectorBuilder(builder)
        weight, scales, bias, x, x_scales, out, out_stride, num_groups = arguments[:8]
        words = ir.VectorType(I16, 2 * LANES)
        floats = ir.VectorType(F32, LANES)

        def bytes_of_group(base: Any, index: Any, num_bytes: int) -> Any:
            return builder.add(base, builder.mul(index, v.integer(num_bytes)))

        def weight_pairs(address: Any) -> list[Any]:
            """The group's weights as int16, a vector for each pair of columns."""
            if width == 8:
                loads = [v.load(v.offset(address, 2 * LANES * i), I8, 2 * LANES) for i in range(size // 2)]
                return [builder.sext(load, words) for load in loads]
            loads = [v.load(v.offset(address, 2 * LANES * i), I8, 2 * LANES) for i in range(size // 4)]
            both = [builder.zext(load, words) for load in loads]
            low = [builder.and_(pair, v.constant(I16, 15, 2 * LANES)) for pair in both]
            high = [builder.lshr(pair, v.constant(I16, 4, 2 * LANES)) for pair in both]
            return [pair for two in zip(low, high, strict=True) for pair in two]

        def add_group(index: Any, sums: list[Any]) -> list[Any]:
            pairs = weight_pairs(bytes_of_group(weight, index, size * LANES * width // 8))
            x_group = bytes_of_group(x, index, 2 * size * rows)
            # Few rows take two chains of sums each, to hide the latency of the additions.
            chains = 2 if rows <= 2 else 1
            integers: list[list[Any]] = [[v.constant(I32, 0, LANES)] * chains for _ in range(rows)]
            for i, pair in enumerate(pairs):
                for row in range(rows):
                    x_pair = v.splat(v.load(v.offset(x_group, 4 * (i * rows + row)), I32), LANES)
                    product = v.pair_dot(pair, builder.bitcast(x_pair, words))
                    integers[row][i % chains] = builder.add(integers[row][i % chains], product)
            parts = 2 if with_minimum else 1
            scale_group = bytes_of_group(scales, index, 2 * LANES * parts)
            scale = builder.fpext(v.load(scale_group, F16, LANES), floats)
            x_scale_group = bytes_of_group(x_scales, index, 8 * rows)
            results = []
            for row in range(rows):
                total = integers[row][0]
                for chain in integers[row][1:]:
                    total = builder.add(total, chain)
                x_scale = v.splat(v.load(v.offset(x_scale_group, 4 * row), F32), LANES)
                result = v.fma(builder.fmul(builder.sitofp(total, floats), x_scale), scale, sums[row])
                if with_minimum:
                    minimum = builder.fpext(v.load(v.offset(scale_group, 2 * LANES), F16, LANES), floats)
                    x_sum = v.splat(v.load(v.offset(x_scale_group, 4 * (rows + row)), F32), LANES)
                    result = v.fma(minimum, x_sum, result)
                results.append(result)
            return results

        initial = v.load(bias, F32, LANES)
        for row, result in enumerate(v.loop(num_groups, [initial] * rows, add_group)):
            v.store(result, builder.add(out, builder.mul(out_stride, v.integer(row))))
        return context.get_dummy_value()

    return signature, codegen


@njit(cache=True)
def _tile_rows(num_rows: int, max_rows: int) -> int:
    """Rows of the tile that takes the next of num_rows rows: the smallest that holds them, or the largest."""
    rows = 1
    while rows < num_rows and rows < max_rows:
        rows *= 2
    return rows


@njit(cache=True)
def _quantize_tile(x, first_row, rows, q, scales, group):  # type: ignore[no-untyped-def]
    """Rows of x [M, K] from first_row on -> a tile at addresses q and scales.

    q: int16 [K/2, rows, 2]; scales: float32 [K/group, 2, rows], scales and sums.
    Rows past the end repeat the last one; their results land in the output's padding.
    """
    for row in range(rows):
        source = x.ctypes.data + min(first_row + row, x.shape[0] - 1) * x.strides[0]
        for g in range(x.shape[1] // group):
            pairs = q + 4 * (g * (group // 2) * rows + row)
            scale = scales + 4 * (2 * g * rows + row)
            if group == 32:
                _quantize_group(source + 4 * g * group, pairs, scale, 4 * rows, 4 * rows, 32)
            else:
                _quantize_group(source + 4 * g * group, pairs, scale, 4 * rows, 4 * rows, 16)


@cache
def _kernel(bits: int, has_minimum: int, group: int) -> Callable:
    """The kernel for one form of weight, compiled at its first call."""

    @njit(parallel=True, cache=True)
    def kernel(x, weight, weight_scales, bias, out, max_rows):  # type: ignore[no-untyped-def]
        num_rows, num_columns = x.shape
        num_groups = num_columns // group
        num_tiles = (num_rows + max_rows - 1) // max_rows
        q = np.empty((num_tiles * max_rows, num_columns), np.int16)
        scales = np.empty((num_tiles * max_rows, num_groups * 2), np.float32)
        if num_tiles == 1:
            rows = _tile_rows(num_rows, max_rows)
            _quantize_tile(x, 0, rows, q.ctypes.data, scales.ctypes.data, group)
        else:
            for tile in prange(num_tiles):
                first_row = tile * max_rows
                rows = _tile_rows(num_rows - first_row, max_rows)
                q_tile = q.ctypes.data + first_row * q.strides[0]
                _quantize_tile(x, first_row, rows, q_tile, scales.ctypes.data + first_row * scales.strides[0], group)
        for panel in prange(weight.shape[0]):
            w = weight.ctypes.data + panel * weight.strides[0]
            ws = weight_scales.ctypes.data + panel * weight_scales.strides[0]
            b = bias.ctypes.data + 4 * LANES * panel
            for tile in range(num_tiles):
                first_row = tile * max_rows
                rows = _tile_rows(num_rows - first_row, max_rows)
                xq = q.ctypes.data + first_row * q.strides[0]
                xs = scales.ctypes.data + first_row * scales.strides[0]
                stride = out.strides[0]
                o = out.ctypes.data + first_row * stride + 4 * LANES * panel
                if rows == 1:
                    _multiply_tile(w, ws, b, xq, xs, o, stride, num_groups, 1, bits, has_minimum, group)
                elif rows == 2:
                    _multiply_tile(w, ws, b, xq, xs, o, stride, num_groups, 2, bits, has_minimum, group)
                elif rows == 4:
                    _multiply_tile(w, ws, b, xq, xs, o, stride, num_groups, 4, bits, has_minimum, group)
                elif rows == 8:
                    _multiply_tile(w, ws, b, xq, xs, o, stride, num_groups, 8, bits, has_minimum, group)
                else:
                    _multiply_tile(w, ws, b, xq, xs, o, stride, num_groups, 16, bits, has_minimum, group)

    return kernel


def grouped_matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    """x float32 [M, K] times the packed weight [N, K] transposed, plus its bias -> [M, N].

    Raises ValueError when x has another number of columns.
    """
    rows, columns = weight.shape
    if x.ndim != 2 or x.shape[1] != columns:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight {weight.shape}")
    num_rows = x.shape[0]
    padded_rows = -(-num_rows // MAX_TILE_ROWS) * MAX_TILE_ROWS
    out = torch.empty((padded_rows, weight.bias.shape[0]), dtype=torch.float32)
    if num_rows:
        kernel = _kernel(weight.bits, int(weight.has_minimum), weight.group)
        kernel(x.contiguous().numpy(), weight.q, weight.scales, weight.bias, out.numpy(), MAX_TILE_ROWS)
    return out[:num_rows, :rows]
