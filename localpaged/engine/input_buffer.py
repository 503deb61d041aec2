"""Moves a step's numbers to the device in one copy, as views of one buffer of int32.

What a captured graph reads is refilled in its place.
"""

import torch
from torch import Tensor

from localpaged.engine.step_input import HostStep
from localpaged.kernels.attention_plan import RANGE_FIELDS, SEGMENT_FIELDS, Ints
from localpaged.kernels.planned_batch import PlannedBatch, PlanTensors


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
