"""Runs the model on a step: copies blocks, builds the batch, one forward pass. Owns the KV memory."""

import torch
from torch import Tensor

from localpaged.engine.batch import build_input
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

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, C] -> float32 [R, V]."""
        return self.decoder.logits(hidden)
