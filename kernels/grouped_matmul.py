"""Activations times a grouped integer weight: int16 by int8 products, float32 in and out.

x float32 [M, K], weight [N, K] as scale * q + minimum per group of columns, bias [N] -> float32 [M, N].
Each group of an activation row becomes int16 with a float32 scale of its own (maximum / 32767): rounded by at
most 2^-16 of the group's maximum, and where that is large for the row, what is left becomes int16 once more.
The products are summed exactly in int32 over the group, the groups in float32. The weights lose nothing.
Source: the block dot products of ggml (github.com/ggml-org/ggml, ggml-quants.c), with int16 in place of int8.
Bound by memory for up to about 4 rows: 5 bits a weight for 4-bit weights with a minimum, 9 for 8-bit ones
without. Beyond, by arithmetic: a vpdpwssd (or vpmaddwd and vpaddd) does twice the products of a float32 FMA.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from localpaged.kernels.grouped_tile import (
    LANES,
    MAX_TILE_ROWS,
    UNPACKED,
    group_bytes,
    group_peak,
    multiply_tile,
    quantize_group,
    unpack_groups,
)
from localpaged.kernels.grouped_weight import GroupedWeight
from localpaged.kernels.vector_ir import HAS_AVX512

# A row's group is rounded in two steps when its peak exceeds this multiple of the mean (root of squares) of the
# row's peaks: such groups carry most of the error.
COARSE_PEAK = np.float32(1.6)
# Groups of a panel that are unpacked at a time: 16 KiB, half of the first cache.
BLOCK_GROUPS = 16
# Rows of activations that the panels are multiplied with one after the other fill so much of the second cache.
SECOND_CACHE = 192 << 10
# So many tiles of rows are worth unpacking a panel.
UNPACKED_TILES = 4 if HAS_AVX512 else 3


def grouped_matmul_reference(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times the dequantised weight [N, K] transposed, plus bias [N]."""
    return torch.nn.functional.linear(x, weight.dequantize(), bias)


@dataclass(frozen=True)
class PackedWeight:
    """A GroupedWeight in the order in which the kernel reads it: panels of LANES rows of the weight.

    q: uint8 [panels, ...]; for 8 bits pairs of columns [K/2, LANES, 2]; for 4 bits two such pairs in each
        byte, the first in the low half
    scales: uint8 [panels, ...], float16 or float32 [K/group, 1 or 2, LANES], the scales and, if any, the minima
    bias: float32 [panels * LANES]
    """

    q: np.ndarray
    scales: np.ndarray
    bias: np.ndarray
    shape: tuple[int, int]
    group: int
    bits: int
    scale_bits: int
    has_minimum: bool

    @cached_property
    def kernel(self) -> Callable:
        """What multiplies weights of this form, compiled at its first call."""
        return _kernel(self.bits, self.scale_bits, int(self.has_minimum), self.group)


def pack_weight(weight: GroupedWeight, bias: Tensor | None = None) -> PackedWeight | None:
    """Reorder a weight for the kernel, without rounding; None where it has not the form that the kernel reads."""
    rows, columns = weight.q.shape
    q, scale, minimum = weight.q.numpy(), weight.scale.numpy(), weight.minimum
    low, high = int(q.min()), int(q.max())
    fits_4_bits = high - low < 16 and minimum is not None and low >= 0
    parts = [scale] if minimum is None else [scale, minimum.numpy()]
    # Scales are a fifth of what is read of 4-bit weights, and nearly nothing beside 8 bits. Those of the K types are
    # products of two numbers, which float16 cannot hold.
    with np.errstate(over="ignore"):
        fits_half = all((part.astype(np.float16).astype(np.float32) == part).all() for part in parts)
    scale_type = np.float16 if fits_4_bits and fits_half else np.float32
    if columns % weight.group or weight.group % 4 or low < -128 or high > 127:
        return None
    panels = -(-rows // LANES)
    padding = panels * LANES - rows
    padded = np.pad(q, ((0, padding), (0, 0)))
    by_pair = padded.reshape(panels, LANES, columns // 2, 2).transpose(0, 2, 1, 3)
    pairs = np.ascontiguousarray(by_pair).view(np.uint8).reshape(panels, columns // 2, 2 * LANES)
    if fits_4_bits:
        pairs = pairs[:, 0::2] | (pairs[:, 1::2] << np.uint8(4))
    stacked = np.stack([np.pad(part.astype(scale_type), ((0, padding), (0, 0))) for part in parts])
    scales = stacked.reshape(len(parts), panels, LANES, -1).transpose(1, 3, 0, 2)
    full_bias = np.zeros(panels * LANES, dtype=np.float32)
    if bias is not None:
        full_bias[:rows] = bias.numpy()
    return PackedWeight(
        np.ascontiguousarray(pairs).reshape(panels, -1),
        np.ascontiguousarray(scales).reshape(panels, -1).view(np.uint8),
        full_bias,
        (rows, columns),
        weight.group,
        4 if fits_4_bits else 8,
        8 * scale_type().itemsize,
        minimum is not None,
    )


@njit(cache=True)
def _tile_rows(num_rows: int) -> int:
    """Rows of the tile that takes the next of num_rows rows: the smallest that holds them, or the largest."""
    rows = 1
    while rows < num_rows and rows < MAX_TILE_ROWS:
        rows *= 2
    return rows


@njit(cache=True)
def _quantize_tile(x, first_row, rows, groups, ends, q, scales, group):  # type: ignore[no-untyped-def]
    """Rows of x [M, K] from first_row on -> the entries of a tile, as in grouped_tile.py.

    groups: int32 [2 * K/group]; ends[b]: entries before block b of BLOCK_GROUPS groups
    q, scales: addresses of int16 [entries, group/2, rows, 2] and float32 [entries, 2, rows], scales and sums
    Whether a row's group gets a second entry depends on that row alone, so that a row's result does not depend on
    its neighbours; those that need none have zeros in it. Rows past the end repeat the last one.
    """
    num_groups = x.shape[1] // group
    peaks = np.empty((rows, num_groups), np.float32)
    limits = np.empty(rows, np.float32)
    coarse = np.zeros(num_groups, np.bool_)
    for row in range(rows):
        source = x.ctypes.data + min(first_row + row, x.shape[0] - 1) * x.strides[0]
        squares = np.float32(0)
        for g in range(num_groups):
            peak = group_peak(source + 4 * g * group, 32) if group == 32 else group_peak(source + 4 * g * group, 16)
            peaks[row, g] = peak
            squares += peak * peak
        limits[row] = COARSE_PEAK * np.sqrt(squares / np.float32(num_groups))
        for g in range(num_groups):
            coarse[g] |= peaks[row, g] > limits[row]
    rest = np.empty((rows, group), np.float32)
    entry = 0
    for g in range(num_groups):
        if g % BLOCK_GROUPS == 0:
            ends[g // BLOCK_GROUPS] = entry
        for part in range(2 if coarse[g] else 1):
            groups[entry] = g
            for row in range(rows):
                left = rest.ctypes.data + row * rest.strides[0]
                source, peak = left, np.float32(0)
                if part == 0:
                    row_address = x.ctypes.data + min(first_row + row, x.shape[0] - 1) * x.strides[0]
                    source, peak = row_address + 4 * g * group, peaks[row, g]
                elif peaks[row, g] > limits[row]:
                    peak = group_peak(left, 32) if group == 32 else group_peak(left, 16)
                else:
                    rest[row] = 0
                pairs = q + 4 * (entry * (group // 2) * rows + row)
                scale = scales + 4 * (2 * entry * rows + row)
                if group == 32:
                    quantize_group(source, peak, pairs, scale, 4 * rows, 4 * rows, left, 32)
                else:
                    quantize_group(source, peak, pairs, scale, 4 * rows, 4 * rows, left, 16)
            entry += 1
    ends[ends.shape[0] - 1] = entry


@cache
def _kernel(bits: int, scale_bits: int, has_minimum: int, group: int) -> Callable:
    """The kernel for one form of weight, compiled at its first call."""
    q_bytes, scale_bytes = group_bytes(bits, scale_bits, has_minimum, group)
    unpacked_q_bytes, unpacked_scale_bytes = group_bytes(UNPACKED, 32, has_minimum, group)

    @njit(parallel=True, cache=True)
    def kernel(x, weight, weight_scales, bias, out):  # type: ignore[no-untyped-def]
        num_rows, num_columns = x.shape
        num_groups = num_columns // group
        num_tiles = (num_rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
        num_blocks = (num_groups + BLOCK_GROUPS - 1) // BLOCK_GROUPS
        groups = np.empty((num_tiles, 2 * num_groups), np.int32)
        ends = np.empty((num_tiles, num_blocks + 1), np.int32)
        q = np.empty((num_tiles, 2 * num_columns * MAX_TILE_ROWS), np.int16)
        scales = np.empty((num_tiles, 4 * num_groups * MAX_TILE_ROWS), np.float32)
        stride = out.strides[0]
        if num_tiles == 1:
            rows = _tile_rows(num_rows)
            _quantize_tile(x, 0, rows, groups[0], ends[0], q.ctypes.data, scales.ctypes.data, group)
        else:
            for tile in prange(num_tiles):
                first_row = tile * MAX_TILE_ROWS
                rows = MAX_TILE_ROWS if num_tiles >= UNPACKED_TILES else _tile_rows(num_rows - first_row)
                q_tile = q.ctypes.data + tile * q.strides[0]
                scale_tile = scales.ctypes.data + tile * scales.strides[0]
                _quantize_tile(x, first_row, rows, groups[tile], ends[tile], q_tile, scale_tile, group)
        if num_tiles >= UNPACKED_TILES:
            num_panels = weight.shape[0]
            tiles_at_once = max(SECOND_CACHE // (2 * num_columns * MAX_TILE_ROWS), 1)
            num_parts = (num_tiles + tiles_at_once - 1) // tiles_at_once
            for unit in prange(num_parts * num_panels):
                part, panel = unit // num_panels, unit % num_panels
                w = weight.ctypes.data + panel * weight.strides[0]
                ws = weight_scales.ctypes.data + panel * weight_scales.strides[0]
                unpacked = np.empty(BLOCK_GROUPS * unpacked_q_bytes, np.uint8)
                unpacked_scales = np.empty(BLOCK_GROUPS * unpacked_scale_bytes, np.uint8)
                for block in range(num_blocks):
                    first = block * BLOCK_GROUPS
                    count = min(BLOCK_GROUPS, num_groups - first)
                    u, us = unpacked.ctypes.data, unpacked_scales.ctypes.data
                    unpack_groups(
                        w + first * q_bytes, ws + first * scale_bytes, u, us, count,
                        bits, scale_bits, has_minimum, group,
                    )  # fmt: skip
                    u -= first * unpacked_q_bytes
                    us -= first * unpacked_scale_bytes
                    for tile in range(part * tiles_at_once, min((part + 1) * tiles_at_once, num_tiles)):
                        o = out.ctypes.data + tile * MAX_TILE_ROWS * stride + 4 * LANES * panel
                        initial, initial_stride = o, stride
                        if block == 0:
                            initial, initial_stride = bias.ctypes.data + 4 * LANES * panel, 0
                        entry = ends[tile, block]
                        count = ends[tile, block + 1] - entry
                        which = groups.ctypes.data + tile * groups.strides[0] + 4 * entry
                        xq = q.ctypes.data + tile * q.strides[0] + 2 * entry * group * MAX_TILE_ROWS
                        xs = scales.ctypes.data + tile * scales.strides[0] + 8 * entry * MAX_TILE_ROWS
                        multiply_tile(
                            u, us, initial, initial_stride, which, xq, xs, o, stride, count,
                            MAX_TILE_ROWS, UNPACKED, 32, has_minimum, group,
                        )  # fmt: skip
            return
        for panel in prange(weight.shape[0]):
            w = weight.ctypes.data + panel * weight.strides[0]
            ws = weight_scales.ctypes.data + panel * weight_scales.strides[0]
            b = bias.ctypes.data + 4 * LANES * panel
            for tile in range(num_tiles):
                rows = _tile_rows(num_rows - tile * MAX_TILE_ROWS)
                which = groups.ctypes.data + tile * groups.strides[0]
                xq = q.ctypes.data + tile * q.strides[0]
                xs = scales.ctypes.data + tile * scales.strides[0]
                o = out.ctypes.data + tile * MAX_TILE_ROWS * stride + 4 * LANES * panel
                n = ends[tile, num_blocks]
                if rows == 1:
                    multiply_tile(w, ws, b, 0, which, xq, xs, o, stride, n, 1, bits, scale_bits, has_minimum, group)
                elif rows == 2:
                    multiply_tile(w, ws, b, 0, which, xq, xs, o, stride, n, 2, bits, scale_bits, has_minimum, group)
                elif rows == 4:
                    multiply_tile(w, ws, b, 0, which, xq, xs, o, stride, n, 4, bits, scale_bits, has_minimum, group)
                elif rows == 8:
                    multiply_tile(w, ws, b, 0, which, xq, xs, o, stride, n, 8, bits, scale_bits, has_minimum, group)
                else:
                    multiply_tile(w, ws, b, 0, which, xq, xs, o, stride, n, 16, bits, scale_bits, has_minimum, group)

    return kernel


def grouped_matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    """x float32 [M, K] times the packed weight [N, K] transposed, plus its bias -> [M, N].

    Raises ValueError when x has another number of columns.
    """
    rows, columns = weight.shape
    if x.ndim != 2 or x.shape[1] != columns:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight {weight.shape}")
    array = x.contiguous().numpy()
    num_rows = array.shape[0]
    out = np.empty((-(-num_rows // MAX_TILE_ROWS) * MAX_TILE_ROWS, weight.bias.shape[0]), np.float32)
    if num_rows:
        weight.kernel(array, weight.q, weight.scales, weight.bias, out)
    return torch.from_numpy(out[:num_rows, :rows])
