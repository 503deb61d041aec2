"""Decode steps as captured CUDA graphs, one for each padded number of rows: hundreds of launches become one.

A graph reads its input from memory of its own, which is filled before each replay, and leaves hidden states and
logits where it always does. Where there is no CUDA the same memory is used and the computation is called, so that
padding and reuse are tested without a GPU. Prefill runs outside graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localpaged.engine.step_input import Geometry, HostStep, InputBuffer
from localpaged.kernels.planned_batch import PlannedBatch

Compute = Callable[[Tensor, PlannedBatch], tuple[Tensor, Tensor]]
"""(token_ids, batch) to (hidden states [T, C], logits float32 [T, V])."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Padded numbers of rows: 1, 2, 4 and then every 8, up to max_num_seqs."""
    return [size for size in (1, 2, 4) if size < max_num_seqs] + [*range(8, max_num_seqs, 8), max_num_seqs]


@dataclass(slots=True)
class _Captured:
    memory: Tensor
    token_ids: Tensor
    batch: PlannedBatch
    hidden: Tensor
    logits: Tensor
    graph: "torch.cuda.CUDAGraph | None"


class DecodeGraphs:
    """Graphs of one model over one pool, captured when first needed or by capture_all()."""

    def __init__(
        self, compute: Compute, buffer: InputBuffer, geometry: Geometry, max_num_seqs: int, max_blocks: int
    ) -> None:
        self.sizes = graph_sizes(max_num_seqs)
        self._compute = compute
        self._buffer = buffer
        self._geometry = geometry
        self._max_blocks = max_blocks
        self._captured: dict[tuple[int, bool], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if buffer.device.type == "cuda" else None

    def fits(self, host: HostStep) -> bool:
        """Whether there is a graph for this step: decode rows only, and not too many."""
        return not host.prefill_plans and 0 < host.num_decode <= self.sizes[-1]

    def run(self, host: HostStep) -> tuple[Tensor, Tensor]:
        """Compute a step that fits: hidden states [D, C] and logits float32 [D, V], valid until the next run."""
        size = next(size for size in self.sizes if size >= host.num_decode)
        padded = host.pad(size, self._max_blocks, self._geometry)
        captured = self._captured.get((size, host.shares))
        if captured is None:
            captured = self._captured[size, host.shares] = self._capture(padded)
        else:
            self._buffer.fill(padded, captured.memory)
        if captured.graph is not None:
            captured.graph.replay()
        else:
            captured.hidden, captured.logits = self._compute(captured.token_ids, captured.batch)
        return captured.hidden[: host.num_decode], captured.logits[: host.num_decode]

    def capture_all(self) -> None:
        """Capture every graph on rows without context, largest first, so that later ones fit its memory."""
        for size in reversed(self.sizes):
            for shares in (False, True):
                host = HostStep.empty(size, self._geometry, shares)
                self._captured[size, shares] = self._capture(host.pad(size, self._max_blocks, self._geometry))

    def _capture(self, padded: HostStep) -> _Captured:
        token_ids, batch, memory = self._buffer.fill(padded)
        if self._pool is None:
            return _Captured(memory, token_ids, batch, *self._compute(token_ids, batch), None)
        # Whatever is compiled or allocated at the first call is not to be captured.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute(token_ids, batch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden, logits = self._compute(token_ids, batch)
        return _Captured(memory, token_ids, batch, hidden, logits, graph)
