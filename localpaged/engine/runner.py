"""Runs the model on a step: copies blocks, builds the batch, one forward pass. Owns the KV memory."""

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localpaged.engine.batch import build_input
from localpaged.engine.rates import Rates
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.scheduler import Chunk, Step
from localpaged.engine.sequence import Request
from localpaged.kernels.block_copy import copy_blocks
from localpaged.models.decoder import Decoder


class ModelRunner:
    """One decoder and its paged KV: for each layer K and V, [num_blocks, num_kv_heads, block_size, head_dim]."""

    def __init__(self, decoder: Decoder, num_blocks: int, block_size: int) -> None:
        config = decoder.config
        self.decoder = decoder
        self.block_size = block_size
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        # Not filled: what no token has written takes no memory, and nothing reads it.
        self.caches = [(torch.empty(shape), torch.empty(shape)) for _ in range(config.num_layers)]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V that one block takes in all layers."""
        return sum(cache[0].nbytes for pair in self.caches for cache in pair)

    def warm_up(self) -> None:
        """Compile or load every kernel before the first request comes, on block 0, which is still free."""
        for num_sequences, num_tokens in ((2, 1), (1, 9)):
            self._try(num_sequences, num_tokens)

    def measure(self, rates: Rates) -> None:
        """Give the rates something to begin with, on block 0 too."""
        for num_sequences, num_tokens in ((1, 1), (8, 1), (1, 64)):
            start = time.perf_counter()
            self._try(num_sequences, num_tokens)
            elapsed = time.perf_counter() - start
            decodes = num_sequences if num_tokens == 1 else 0
            rates.observe(decodes, 0 if decodes else num_tokens, elapsed)

    def _try(self, num_sequences: int, num_tokens: int) -> None:
        step = Step()
        for index in range(num_sequences):
            request = Request("warm-up", [0] * num_tokens, SamplingParams(n=num_sequences), 0, 1)
            sequence = request.sequences[index]
            sequence.block_table = [0] * -(-num_tokens // self.block_size)
            (step.decodes if num_tokens == 1 else step.prefills).append(Chunk(sequence, num_tokens, True))
        self.logits(self.forward(step)[-1:])

    def forward(self, step: Step, every_row: bool = False) -> Tensor:
        """Compute a step: hidden states [chunks, C] after the last token of each of step.chunks.

        every_row: those of all tokens, [T, C], one chunk's after the other's.
        """
        if step.copies:
            pairs = torch.tensor([(copy.source, copy.destination) for copy in step.copies])
            copy_blocks([cache for pair in self.caches for cache in pair], pairs)
        token_ids, batch = build_input(step, self.block_size)
        return self.decoder.forward(token_ids, batch, self.caches, every_row)

    def read_blocks(self, blocks: list[int]) -> NDArray[np.float32]:
        """A copy of these blocks' K and V, [blocks, layers, 2, num_kv_heads, block_size, head_dim]."""
        index = torch.tensor(blocks)
        pairs = [torch.stack([k[index], v[index]], dim=1) for k, v in self.caches]
        return torch.stack(pairs, dim=1).numpy()

    def write_blocks(self, blocks: list[int], kv: NDArray[np.float32]) -> None:
        """Put what read_blocks() gave into blocks."""
        index, values = torch.tensor(blocks), torch.from_numpy(kv)
        for layer, (k, v) in enumerate(self.caches):
            k[index], v[index] = values[:, layer, 0], values[:, layer, 1]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, C] -> float32 [R, V]."""
        return self.decoder.logits(hidden)
