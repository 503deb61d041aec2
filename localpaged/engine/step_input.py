"""Turns a step of the scheduler into one buffer for a GPU: tokens, slots, tables, and the attention's segments.

Everything is built on the host in int32 and moved by one copy. While the device computes a step, the next one is
prepared as if every candidate went on; what the scheduler changes about it (a block more, a copied one) is patched.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localpaged.kernels.attention_plan import (
    RANGE_FIELDS,
    SEGMENT_FIELDS,
    SHARE_MIN_KEYS,
    AttentionPlan,
    plan_decode,
    plan_prefill,
)
from localpaged.kernels.planned_batch import PlannedBatch, PlanTensors
from localpaged.kernels.tile_config import PROGRAMS_EACH, decode_config, prefill_config

if TYPE_CHECKING:
    from localpaged.engine.scheduler import Step
    from localpaged.engine.sequence import Sequence

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What planning needs to know of a model and a card. windows: every window that a layer has, None for none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    block_size: int
    element_bytes: int
    capability: int
    num_multiprocessors: int

    @property
    def repeats(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def target_segments(self) -> int:
        """Segments that keep the device busy; each has a program for every KV head."""
        return -(-self.num_multiprocessors * PROGRAMS_EACH // self.num_kv_heads)

    def decode_segments_at_most(self, num_rows: int) -> int:
        return 2 * num_rows + self.target_segments


@dataclass(slots=True)
class HostStep:
    """A step's numbers on the host. Decode rows first; rows past num_decode of a padded step have no context."""

    token_ids: Ints
    slots: Ints
    positions: Ints
    tables: Ints
    num_decode: int
    decode_plans: dict[int | None, AttentionPlan]
    prefill_plans: dict[int | None, AttentionPlan]
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
        slots = tables[rows, positions // block_size] * block_size + positions % block_size
        num_decode = len(decodes)
        starts, shared = group_rows(decodes, lens[:num_decode], tables, block_size)
        shares = bool((shared * block_size >= SHARE_MIN_KEYS).any())
        decode_plans, prefill_plans = {}, {}
        for window in geometry.windows:
            if num_decode:
                config = decode_config(
                    geometry.head_dim, geometry.repeats, shares, geometry.capability, geometry.element_bytes
                )
                decode_plans[window] = plan_decode(
                    lens[:num_decode],
                    starts,
                    shared,
                    block_size=block_size,
                    window=window,
                    rows_per_tile=config.rows(geometry.repeats),
                    target_segments=geometry.target_segments,
                    tile_keys=config.block_n,
                    share_min_keys=SHARE_MIN_KEYS,
                )
            if prefills:
                config = prefill_config(
                    geometry.head_dim, geometry.repeats, geometry.capability, geometry.element_bytes
                )
                prefill_plans[window] = plan_prefill(
                    np.concatenate([ends[num_decode:] - sizes[num_decode:], ends[-1:]]).astype(np.int32),
                    lens[num_decode:],
                    first_table=num_decode,
                    window=window,
                    rows_per_tile=config.rows(geometry.repeats),
                    target_segments=geometry.target_segments,
                    tile_keys=config.block_n,
                )
        last = (ends - 1).astype(np.int32) if prefills else None
        return HostStep(
            token_ids, slots.astype(np.int32), positions, tables, num_decode, decode_plans, prefill_plans, last, shares
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


class InputBuffer:
    """The device's copy of a step, and two on the host, so that one can be filled while the other is being read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host: list[Tensor] = [torch.empty(0, dtype=torch.int32)] * 2
        # When the device has read each of them.
        self._read: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def fill(self, host: HostStep) -> tuple[Tensor, PlannedBatch, Tensor]:
        """token_ids int32 [T] and the batch on the device, and the memory, flat int32, that they are views of."""
        parts = _parts(host)
        staged, places = self._stage(parts)
        memory = torch.empty(len(staged), dtype=torch.int32, device=self.device)
        self._move(staged, memory)
        pieces = iter([memory[place : place + len(part)] for part, place in zip(parts, places, strict=True)])
        token_ids, slots, positions, limits = (next(pieces) for _ in range(4))
        tables = next(pieces).view(host.tables.shape)
        decode, prefill = (
            {
                window: PlanTensors(
                    next(pieces).view(-1, SEGMENT_FIELDS),
                    next(pieces).view(-1, RANGE_FIELDS),
                    plan.split,
                    host.shares,
                )
                for window, plan in plans.items()
            }
            for plans in (host.decode_plans, host.prefill_plans)
        )
        last = None if host.last is None else next(pieces)
        return token_ids, PlannedBatch(slots, positions, limits, tables, host.num_decode, decode, prefill, last), memory

    def refill(self, host: HostStep, memory: Tensor) -> None:
        """Put a step where an earlier one of the same sizes is."""
        self._move(self._stage(_parts(host))[0], memory)

    def _stage(self, parts: list[Ints]) -> tuple[Tensor, list[int]]:
        """The parts one after the other in host memory, each where a kernel can load 16 bytes at once."""
        places = [0]
        for part in parts:
            places.append(places[-1] + -(-len(part) // 4) * 4)
        staged = self._staging(places.pop())
        view = staged.numpy()
        for part, place in zip(parts, places, strict=True):
            view[place : place + len(part)] = part
        return staged, places

    def _move(self, staged: Tensor, memory: Tensor) -> None:
        memory.copy_(staged, non_blocking=True)
        if self.device.type == "cuda":
            read = self._read[self._turn] = torch.cuda.Event()
            read.record()

    def _staging(self, size: int) -> Tensor:
        self._turn ^= 1
        read = self._read[self._turn]
        if read is not None:
            read.synchronize()
        staged = self._host[self._turn]
        if len(staged) < size:
            pinned = self.device.type == "cuda"
            staged = self._host[self._turn] = torch.empty(2 * size, dtype=torch.int32, pin_memory=pinned)
        return staged[:size]


def _parts(host: HostStep) -> list[Ints]:
    parts = [host.token_ids, host.slots, host.positions, host.positions + 1, host.tables.ravel()]
    for plans in (host.decode_plans, host.prefill_plans):
        for plan in plans.values():
            parts += [plan.segments.ravel(), plan.ranges.ravel()]
    return parts if host.last is None else [*parts, host.last]
