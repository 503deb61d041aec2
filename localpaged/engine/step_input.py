"""Turns a step of the scheduler into the numbers that a GPU needs: tokens, slots, tables, and the attention's segments.

Everything is int32, on the host; input_buffer.py moves it. While the device computes a step, the next one is
prepared as if every candidate went on; what the scheduler changes about it (a block more, a copied one) is patched.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from localpaged.engine.step_plan import Geometry, Plans, plan_step
from localpaged.kernels.attention_plan import RANGE_FIELDS, SEGMENT_FIELDS, AttentionPlan, Ints

if TYPE_CHECKING:
    from localpaged.engine.scheduler import Step
    from localpaged.engine.sequence import Sequence


@dataclass(slots=True)
class HostStep:
    """A step's numbers on the host. Decode rows first; rows past num_decode of a padded step have no context."""

    token_ids: Ints
    slots: Ints
    positions: Ints
    tables: Ints
    num_decode: int
    decode_plans: Plans
    prefill_plans: Plans
    last: Ints | None
    shares: bool

    @staticmethod
    def empty(num_rows: int, geometry: Geometry, shares: bool) -> "HostStep":
        """Rows without context, to try or capture a step of their number."""
        none = np.zeros(num_rows, dtype=np.int32)
        plan = AttentionPlan(
            np.zeros((0, SEGMENT_FIELDS), dtype=np.int32), np.zeros((num_rows, RANGE_FIELDS), dtype=np.int32), True
        )
        tables = np.zeros((num_rows, 1), dtype=np.int32)
        return HostStep(
            none, none - 1, none - 1, tables, num_rows, dict.fromkeys(geometry.windows, plan), {}, None, shares
        )

    def pad(self, num_rows: int, width: int, geometry: Geometry) -> "HostStep":
        """This step of decode rows as one of num_rows rows with tables of `width`, as a captured graph takes it."""
        size = geometry.decode_segments_at_most(num_rows)
        return HostStep(
            _padded(self.token_ids, num_rows),
            _padded(self.slots, num_rows, value=-1),
            _padded(self.positions, num_rows, value=-1),
            _padded(self.tables, num_rows, width),
            num_rows,
            {
                window: AttentionPlan(
                    _padded(plan.segments, size, SEGMENT_FIELDS), _padded(plan.ranges, num_rows, RANGE_FIELDS), True
                )
                for window, plan in self.decode_plans.items()
            },
            {},
            None,
            self.shares,
        )


def _padded(array: Ints, *shape: int, value: int = 0) -> Ints:
    out = np.full(shape, value, dtype=np.int32)
    out[tuple(slice(size) for size in array.shape)] = array
    return out


class StepBuilder:
    """Builds steps, and prepares the likeliest next one."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._prepared: tuple[list[Sequence], HostStep] | None = None
        self.num_prepared_used = 0

    def build(self, step: "Step") -> HostStep:
        """The numbers of a step that has its blocks."""
        sequences = [chunk.sequence for chunk in step.decodes]
        prepared, self._prepared = self._prepared, None
        if prepared is not None and not step.prefills and _same(prepared[0], sequences):
            host = prepared[1]
            if self._patch(host, sequences):
                self.num_prepared_used += 1
                return host
        return self._build(sequences, [(chunk.sequence, chunk.num_tokens) for chunk in step.prefills])

    def prepare(self, sequences: "list[Sequence]") -> None:
        """Prepare the step in which each of these, whose tokens all have KV, computes the one it is about to get."""
        self._prepared = (sequences, self._build(sequences, []))

    def _patch(self, host: HostStep, sequences: "list[Sequence]") -> bool:
        """Fill in what was not known when the step was prepared: the tokens, and each row's last block."""
        block_size = self.geometry.block_size
        width = host.tables.shape[1]
        for row, sequence in enumerate(sequences):
            position, table = sequence.num_computed, sequence.block_table
            if position != host.positions[row] or len(table) > width:
                return False
            host.token_ids[row] = sequence.token_ids[position]
            last = position // block_size
            host.tables[row, last] = table[last]
        blocks = host.tables[np.arange(len(sequences)), host.positions // block_size]
        host.slots[:] = blocks * block_size + host.positions % block_size
        return True

    def _build(self, decodes: "list[Sequence]", prefills: "list[tuple[Sequence, int]]") -> HostStep:
        geometry, block_size = self.geometry, self.geometry.block_size
        sizes = [1] * len(decodes) + [num_tokens for _, num_tokens in prefills]
        sequences = decodes + [sequence for sequence, _ in prefills]
        ends = np.cumsum(sizes, dtype=np.int32)
        lens = np.array([s.num_computed + n for s, n in zip(sequences, sizes, strict=True)], dtype=np.int32)
        width = int(lens.max() + block_size - 1) // block_size
        tables = np.zeros((len(sequences), width), dtype=np.int32)
        token_ids = np.zeros(int(ends[-1]), dtype=np.int32)
        positions = np.empty(len(token_ids), dtype=np.int32)
        for row, (sequence, size) in enumerate(zip(sequences, sizes, strict=True)):
            table = sequence.block_table[:width]
            tables[row, : len(table)] = table
            first, begin = sequence.num_computed, ends[row] - size
            # The token of a prepared step is not there yet.
            tokens = sequence.token_ids[first : first + size]
            token_ids[begin : begin + len(tokens)] = tokens
            positions[begin : ends[row]] = np.arange(first, first + size)
        rows = np.repeat(np.arange(len(sequences)), sizes)
        slots = (tables[rows, positions // block_size] * block_size + positions % block_size).astype(np.int32)
        num_decode = len(decodes)
        starts, shared = group_rows(decodes, lens[:num_decode], tables, block_size)
        plan = plan_step(geometry, lens, sizes[num_decode:], starts, shared)
        last = (ends - 1).astype(np.int32) if prefills else None
        return HostStep(
            token_ids,
            slots,
            positions,
            tables,
            num_decode,
            plan.decode,
            plan.prefill,
            last,
            plan.shares,
        )


def group_rows(decodes: "Items[Sequence]", lens: Ints, tables: Ints, block_size: int) -> tuple[Ints, Ints]:
    """Row ranges int32 [G+1] of requests, and int32 [G] how many leading full blocks the rows of each share."""
    starts, shared = [0], []
    for row in range(1, len(decodes) + 1):
        begin = starts[-1]
        if row < len(decodes) and decodes[row].request is decodes[begin].request:
            continue
        num_shared = 0
        if row - begin > 1:
            num_full = int(lens[begin:row].min() - 1) // block_size
            same = (tables[begin + 1 : row, :num_full] == tables[begin, :num_full]).all(axis=0)
            num_shared = num_full if same.all() else int(same.argmin())
        shared.append(num_shared)
        starts.append(row)
    return np.array(starts, dtype=np.int32), np.array(shared, dtype=np.int32)


def _same(one: "list[Sequence]", other: "list[Sequence]") -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
