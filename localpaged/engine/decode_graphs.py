"""Decode steps as captured CUDA graphs, one for each padded number of rows: hundreds of launches become one.

A graph reads its input from memory of its own, which is filled before each replay, and leaves hidden states and
logits where it always does. Where there is no CUDA the same memory is used and the computation is called, so that
padding and reuse are tested without a GPU. Prefill runs outside graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localpaged.engine.input_buffer import InputBuffer
from localpaged.engine.step_input import HostStep
from localpaged.engine.step_plan import Geometry
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
        # What every graph leaves behind is in the same place, valid until the next run: [most rows, C] and [.., V].
        self._outputs: tuple[Tensor, Tensor] | None = None
        on_cuda = buffer.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_cuda else None
        # One for all: each stream that multiplies keeps a workspace for good.
        self._side = torch.cuda.Stream() if on_cuda else None

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
            self._buffer.refill(padded, captured.memory)
        if captured.graph is not None:
            captured.graph.replay()
        else:
            self._compute_outputs(captured.token_ids, captured.batch)
        assert self._outputs is not None
        hidden, logits = self._outputs
        return hidden[: host.num_decode], logits[: host.num_decode]

    def capture_all(self) -> None:
        """Capture every graph on rows without context, largest first, so that later ones fit its memory."""
        for size in reversed(self.sizes):
            for shares in (False, True):
                host = HostStep.empty(size, self._geometry, shares)
                self._captured[size, shares] = self._capture(host.pad(size, self._max_blocks, self._geometry))

    def _capture(self, padded: HostStep) -> _Captured:
        token_ids, batch, memory = self._buffer.fill(padded)
        if self._side is None:
            return _Captured(memory, token_ids, batch, None)
        # Whatever is compiled or allocated at the first call is not to be captured.
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._compute_outputs(token_ids, batch)
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # Another thread of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            self._compute_outputs(token_ids, batch)
        return _Captured(memory, token_ids, batch, graph)

    def _compute_outputs(self, token_ids: Tensor, batch: PlannedBatch) -> None:
        computed = self._compute(token_ids, batch)
        if self._outputs is None:
            most = self.sizes[-1]
            hidden, logits = (part.new_empty(most, part.shape[1]) for part in computed)
            self._outputs = hidden, logits
        for kept, part in zip(self._outputs, computed, strict=True):
            kept[: part.shape[0]].copy_(part)
