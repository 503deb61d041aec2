"""Cuts a step's attention into segments of about equal cost, which a GPU's programs take one each.

A segment is some adjacent query rows that attend to one range of keys through one block table: the rows of a group to
the blocks that they share, one decode row to its own keys, or a tile of a chunk's rows to their context. Long ones
are split by keys (Flash-Decoding); what the segments of a row give is merged by its log-sum-exp. Planned on the host
with numpy and numba from lengths alone; knows nothing of tensors, heads or what is computed.
Source: Hydragen (arXiv:2402.05099), section 3.2, for prefix and suffix; FlashInfer (arXiv:2501.01005), section 3.3,
for planning before the launch.
"""

from dataclasses import dataclass, replace

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int32]

SEGMENT_FIELDS = 8  # first_row, num_rows, table_row, first_key, end_key, and three that are free
RANGE_FIELDS = 6  # first segment, end, first lane; and the same for a second range
# A window that nothing reaches, for attention without one.
NO_WINDOW = 2**31 - 1
# Prefixes shorter than this are read once for each row: packing rows pays from some length on. Not yet measured.
SHARE_MIN_KEYS = 256
# Splitting further costs more in merging than it gains in balance. Not yet measured.
SPLIT_MIN_KEYS = 256


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """segments int32 [S, SEGMENT_FIELDS]; ranges int32 [rows, RANGE_FIELDS], the segments that make up each row.

    split: whether some row has more than one segment, so that they must be merged.
    """

    segments: Ints
    ranges: Ints
    split: bool


def plan_decode(
    context_lens: Ints,
    group_starts: Ints,
    group_shared_blocks: Ints,
    *,
    block_size: int,
    window: int | None,
    rows_per_tile: int,
    target_segments: int,
    tile_keys: int,
    share_min_keys: int = SHARE_MIN_KEYS,
    split_min_keys: int = SPLIT_MIN_KEYS,
) -> AttentionPlan:
    """Plan decode rows; row i has block table i. At most 2 * rows + target_segments segments.

    context_lens: int32 [D], the query's own token included; a row of length 0 has no segment
    group_starts: int32 [G+1]; group_shared_blocks: int32 [G], leading full blocks in common
    rows_per_tile: how many rows one segment can hold
    target_segments: about how many keep the device busy
    """
    units, first_unit = _decode_units(
        context_lens,
        group_starts,
        group_shared_blocks,
        block_size,
        NO_WINDOW if window is None else window,
        rows_per_tile,
        share_min_keys,
    )
    plan = _plan(units, first_unit, context_lens.shape[0], target_segments, tile_keys, split_min_keys)
    # Merging even what is whole costs little, and keeps one form of the kernel.
    return replace(plan, split=True)


def plan_prefill(
    starts: Ints,
    context_lens: Ints,
    *,
    first_table: int,
    window: int | None,
    rows_per_tile: int,
    target_segments: int,
    tile_keys: int,
    split_min_keys: int = SPLIT_MIN_KEYS,
) -> AttentionPlan:
    """Plan chunks; chunk i has block table first_table + i, and its rows begin at starts[i] - starts[0].

    starts: int32 [P+1]; context_lens: int32 [P], the chunk included
    """
    units, first_unit = _prefill_units(
        starts, context_lens, first_table, NO_WINDOW if window is None else window, rows_per_tile
    )
    return _plan(units, first_unit, int(starts[-1] - starts[0]), target_segments, tile_keys, split_min_keys)


def _plan(
    units: Ints, first_unit: Ints, num_rows: int, target_segments: int, tile_keys: int, split_min_keys: int
) -> AttentionPlan:
    segments, ranges = _split(units, first_unit, num_rows, target_segments, tile_keys, split_min_keys)
    split = bool(segments.shape[0] and (ranges[:, 1] - ranges[:, 0] + ranges[:, 4] - ranges[:, 3]).max() > 1)
    return AttentionPlan(segments, ranges, split)


@njit(cache=True)
def _decode_units(lens, group_starts, shared_blocks, block_size, window, rows_per_tile, share_min_keys):  # type: ignore[no-untyped-def]
    """Units int32 [U, 5] as segments have them, and first_unit int32 [D, 2]: a row's shared unit and its own, or -1."""
    num_rows = lens.shape[0]
    units = np.empty((2 * num_rows, 5), np.int32)
    of_row = np.full((num_rows, 2), -1, np.int32)
    count = 0
    for group in range(group_starts.shape[0] - 1):
        for first in range(group_starts[group], group_starts[group + 1], rows_per_tile):
            end = min(first + rows_per_tile, group_starts[group + 1])
            shared = shared_blocks[group] * block_size
            start = shared
            for row in range(first, end):
                start = min(start, max(0, lens[row] - window))
            if end - first < 2 or shared - start < share_min_keys:
                shared = 0
            else:
                units[count, 0], units[count, 1], units[count, 2] = first, end - first, first
                units[count, 3], units[count, 4] = start, shared
                for row in range(first, end):
                    of_row[row, 0] = count
                count += 1
            for row in range(first, end):
                start = max(shared, lens[row] - window)
                if start < lens[row]:
                    units[count, 0], units[count, 1], units[count, 2] = row, 1, row
                    units[count, 3], units[count, 4] = start, lens[row]
                    of_row[row, 1] = count
                    count += 1
    return units[:count], of_row


@njit(cache=True)
def _prefill_units(starts, context_lens, first_table, window, rows_per_tile):  # type: ignore[no-untyped-def]
    num_rows = starts[-1] - starts[0]
    most = num_rows // rows_per_tile + starts.shape[0]
    units = np.empty((most, 5), np.int32)
    of_row = np.full((num_rows, 2), -1, np.int32)
    count = 0
    for chunk in range(context_lens.shape[0]):
        begin, end = starts[chunk] - starts[0], starts[chunk + 1] - starts[0]
        for first in range(begin, end, rows_per_tile):
            last = min(first + rows_per_tile, end)
            # Keys that the tile's first and last row see.
            first_seen = context_lens[chunk] - (end - first) + 1
            last_seen = context_lens[chunk] - (end - last)
            units[count, 0], units[count, 1], units[count, 2] = first, last - first, first_table + chunk
            units[count, 3], units[count, 4] = max(0, first_seen - window), last_seen
            for row in range(first, last):
                of_row[row, 1] = count
            count += 1
    return units[:count], of_row


@njit(cache=True)
def _split(units, of_row, num_rows, target_segments, tile_keys, split_min_keys):  # type: ignore[no-untyped-def]
    total = 0
    for unit in range(units.shape[0]):
        total += units[unit, 4] - units[unit, 3]
    size = max(split_min_keys, (total + target_segments - 1) // target_segments, 1)
    size = (size + tile_keys - 1) // tile_keys * tile_keys
    segments = np.zeros((units.shape[0] + total // size, 8), np.int32)
    bounds = np.zeros(units.shape[0] + 1, np.int32)
    count = 0
    for unit in range(units.shape[0]):
        begin, end = units[unit, 3], units[unit, 4]
        pieces = (end - begin + size - 1) // size
        # Equal pieces on whole tiles.
        step = ((end - begin + pieces - 1) // pieces + tile_keys - 1) // tile_keys * tile_keys
        for first in range(begin, end, step):
            segments[count, :3] = units[unit, :3]
            segments[count, 3], segments[count, 4] = first, min(first + step, end)
            count += 1
        bounds[unit + 1] = count
    ranges = np.zeros((num_rows, 6), np.int32)
    for row in range(num_rows):
        for part in range(2):
            unit = of_row[row, part]
            if unit >= 0:
                ranges[row, 3 * part] = bounds[unit]
                ranges[row, 3 * part + 1] = bounds[unit + 1]
                ranges[row, 3 * part + 2] = row - units[unit, 0]
    return segments[:count], ranges
