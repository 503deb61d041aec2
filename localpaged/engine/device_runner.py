"""Runs the model on a step on a GPU: one copy of the step's numbers, then kernels, or one captured graph.

Nothing here waits for the device: forward() and logits() return tensors that will be there.
"""

import numpy as np
import torch
from torch import Tensor

from localpaged.engine.decode_graphs import DecodeGraphs
from localpaged.engine.host_blocks import HostBlocks, HostTransfers
from localpaged.engine.input_buffer import InputBuffer
from localpaged.engine.scheduler import Step
from localpaged.engine.sequence import Sequence
from localpaged.engine.step_input import StepBuilder
from localpaged.engine.step_plan import Geometry
from localpaged.kernels.block_copy import copy_blocks
from localpaged.kernels.paged_kv import PagedKV
from localpaged.kernels.planned_batch import PlannedBatch
from localpaged.models.decoder import Decoder


class DeviceRunner:
    """One decoder and its paged KV on a device; see runner.Runner.

    max_num_seqs, max_model_len: bound the rows and the block tables of captured graphs
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        geometry: Geometry,
        max_num_seqs: int,
        max_model_len: int,
        use_graphs: bool = True,
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self.builder = StepBuilder(geometry)
        self._buffer = InputBuffer(kv.values.device)
        self._transfers = HostTransfers(kv)
        max_blocks = -(-max_model_len // geometry.block_size)
        self.graphs = (
            DecodeGraphs(self._compute, self._buffer, geometry, max_num_seqs, max_blocks) if use_graphs else None
        )
        self._graph_logits: tuple[Tensor, Tensor] | None = None

    @property
    def bytes_per_block(self) -> int:
        return self.kv.bytes_per_block

    def forward(self, step: Step, every_row: bool = False) -> Tensor:
        if step.copies:
            self._transfers.wait()
            pairs = torch.tensor([(copy.source, copy.destination) for copy in step.copies])
            copy_blocks(self.kv.parts, self.kv.parts, pairs)
        host = self.builder.build(step)
        if self.graphs is not None and self.graphs.fits(host):
            self._transfers.wait()
            hidden, logits = self.graphs.run(host)
            self._graph_logits = hidden, logits
            return hidden
        self._graph_logits = None
        token_ids, batch, _ = self._buffer.fill(host)
        before_layer = self._transfers.wait_for_layer if self._transfers.arriving else None
        hidden = self.decoder.forward(token_ids, batch, self.kv.layers, every_row, before_layer)
        self._transfers.wait()
        return hidden

    def logits(self, hidden: Tensor, rows: list[int] | None = None) -> Tensor:
        if self._graph_logits is not None and hidden is self._graph_logits[0]:
            logits = self._graph_logits[1]
            return logits if rows is None or rows == list(range(logits.shape[0])) else logits[self._index(rows)]
        return self.decoder.logits(hidden if rows is None else hidden[self._index(rows)])

    def wait(self) -> None:
        if self._buffer.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def prepare(self, sequences: list[Sequence]) -> None:
        if sequences:
            self.builder.prepare(sequences)

    def read_blocks(self, blocks: list[int]) -> HostBlocks:
        """A copy of these blocks' K and V in host memory, on its way there beside the next steps."""
        return self._transfers.read(blocks)

    def write_blocks(self, blocks: list[int], kv: np.ndarray) -> None:
        """Put what read_blocks() gave into blocks; the next step waits for it, the host does not."""
        self._transfers.write(blocks, kv)

    def _compute(self, token_ids: Tensor, batch: PlannedBatch) -> tuple[Tensor, Tensor]:
        hidden = self.decoder.forward(token_ids, batch, self.kv.layers)
        return hidden, self.decoder.logits(hidden)

    def _index(self, rows: list[int]) -> Tensor:
        index = torch.tensor(rows, pin_memory=self._buffer.device.type == "cuda")
        return index.to(self._buffer.device, non_blocking=True)
