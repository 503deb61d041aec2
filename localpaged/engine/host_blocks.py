"""KV blocks on their way between a device's pool and host memory, beside the steps.

Out: a step's stream gathers the blocks into one buffer, and a side stream brings that to pinned memory.
In: the side stream writes the blocks straight from pinned memory, layer by layer, and a layer of the next step waits
for its own part only. Where there are no streams (Triton's interpreter) the same copies are made at once.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localpaged.kernels.block_copy import copy_blocks
from localpaged.kernels.paged_kv import PagedKV

Bytes = NDArray[np.uint8]


class HostBlocks:
    """Blocks that are being copied to host memory."""

    def __init__(self, memory: Tensor, arrived: "torch.cuda.Event | None") -> None:
        self._memory = memory
        self._arrived = arrived

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Bytes:
        """uint8 [blocks, bytes_per_block], once it is there; any thread may wait for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        array: Bytes = self._memory.numpy()
        return array


class HostTransfers:
    """The copies of one pool. A block's bytes are all layers' keys and values, then all scales."""

    def __init__(self, kv: PagedKV) -> None:
        self._kv = kv
        self._device = kv.values.device
        self._side = torch.cuda.Stream() if self._device.type == "cuda" else None
        # One event a layer whose blocks are still being written.
        self._arrivals: list[torch.cuda.Event] = []
        # Host memory that is being read, until the event.
        self._held: list[tuple[Tensor, torch.cuda.Event]] = []

    def read(self, blocks: list[int]) -> HostBlocks:
        """Start copying these blocks out; what is done to them afterwards does not change the copy."""
        kv, side = self._kv, self._side
        self.wait()
        staged = torch.empty(len(blocks), kv.bytes_per_block, dtype=torch.uint8, device=self._device)
        copy_blocks(kv.parts, self._parts(staged), torch.tensor([(block, i) for i, block in enumerate(blocks)]))
        if side is None:
            return HostBlocks(staged, None)
        memory = torch.empty(staged.shape, dtype=torch.uint8, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            memory.copy_(staged, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(side)
        staged.record_stream(side)
        return HostBlocks(memory, arrived)

    def write(self, blocks: list[int], array: Bytes) -> None:
        """Start copying what read() gave, as an array, into these blocks."""
        kv, side = self._kv, self._side
        memory = torch.from_numpy(array)
        scope: AbstractContextManager[object] = nullcontext()
        if side is not None:
            memory = memory if memory.is_pinned() else memory.pin_memory()
            side.wait_stream(torch.cuda.current_stream())
            scope = torch.cuda.stream(side)
        pairs = torch.tensor([(i, block) for i, block in enumerate(blocks)])
        sources = self._parts(memory)
        with scope:
            for layer in range(len(kv.layers)):
                own = slice(2 * layer, 2 * layer + 2)
                copy_blocks([part[own] for part in sources], [part[own] for part in kv.parts], pairs)
                if side is not None:
                    arrived = torch.cuda.Event()
                    arrived.record(side)
                    self._arrivals.append(arrived)
        if side is not None:
            self._held = [(held, read) for held, read in self._held if not read.query()]
            self._held.append((memory, self._arrivals[-1]))

    def wait_for_layer(self, layer: int) -> None:
        """Let what is launched from here on come after the arrival of this layer's blocks."""
        for arrived in self._arrivals[layer :: len(self._kv.layers)]:
            torch.cuda.current_stream().wait_event(arrived)

    def wait(self) -> None:
        """Let what is launched from here on come after every arrival."""
        if self._arrivals:
            torch.cuda.current_stream().wait_event(self._arrivals[-1])
            self._arrivals.clear()

    @property
    def arriving(self) -> bool:
        return bool(self._arrivals)

    def _parts(self, memory: Tensor) -> list[Tensor]:
        """uint8 [blocks, bytes_per_block] as tensors like PagedKV.parts, [2 * layers, blocks, ...]."""
        place, parts = 0, []
        for part in self._kv.parts:
            shape = (len(memory), part.shape[0], *part.shape[2:])
            size = part.nbytes // self._kv.num_blocks
            parts.append(memory[:, place : place + size].view(part.dtype).view(shape).transpose(0, 1))
            place += size
        return parts
