"""Runs the model on a step on the CPU: copies blocks, builds the batch, one forward pass. Owns the KV memory."""

import time
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localpaged.engine.batch import build_input
from localpaged.engine.rates import Rates
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.scheduler import Chunk, Step
from localpaged.engine.sequence import Request, Sequence
from localpaged.kernels.block_copy import copy_blocks
from localpaged.kernels.paged_kv import PagedKV
from localpaged.models.decoder import Decoder


class Runner(Protocol):
    """What the engine asks of a device: this module's for the CPU, device_runner.py's for a GPU."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V that one block takes in all layers."""
        ...

    def forward(self, step: Step, every_row: bool = False) -> Tensor:
        """Compute a step: hidden states [chunks, C] after the last token of each of step.chunks.

        every_row: those of all tokens, [T, C], one chunk's after the other's. Valid until the next step.
        """
        ...

    def logits(self, hidden: Tensor, rows: list[int] | None = None) -> Tensor:
        """float32 [R, V] of these rows of what forward() gave, or of all."""
        ...

    def wait(self) -> None:
        """Wait for what has been started; for steps from which nothing is drawn."""
        ...

    def prepare(self, sequences: list[Sequence]) -> None:
        """These will probably be the next step, one token each: prepare it while the device is busy."""
        ...


class ModelRunner:
    """One decoder and its paged KV in the computer's memory; see Runner."""

    def __init__(self, decoder: Decoder, num_blocks: int, block_size: int) -> None:
        config = decoder.config
        self.decoder = decoder
        self.block_size = block_size
        self.kv = PagedKV(config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim)

    @property
    def bytes_per_block(self) -> int:
        return self.kv.bytes_per_block

    def forward(self, step: Step, every_row: bool = False) -> Tensor:
        if step.copies:
            pairs = torch.tensor([(copy.source, copy.destination) for copy in step.copies])
            copy_blocks(self.kv.parts, self.kv.parts, pairs)
        token_ids, batch = build_input(step, self.block_size)
        return self.decoder.forward(token_ids, batch, self.kv.layers, every_row)

    def logits(self, hidden: Tensor, rows: list[int] | None = None) -> Tensor:
        return self.decoder.logits(hidden if rows is None else hidden[rows])

    def wait(self) -> None:
        """Nothing: it is done when it returns."""

    def prepare(self, sequences: list[Sequence]) -> None:
        """Nothing: the processor that would prepare it is the one that is busy."""

    def read_blocks(self, blocks: list[int]) -> NDArray[np.float32]:
        """A copy of these blocks' K and V, [blocks, 2 * layers, num_kv_heads, block_size, head_dim]."""
        return self.kv.values[:, torch.tensor(blocks)].transpose(0, 1).contiguous().numpy()

    def write_blocks(self, blocks: list[int], kv: NDArray[np.float32]) -> None:
        """Put what read_blocks() gave into blocks."""
        self.kv.values[:, torch.tensor(blocks)] = torch.from_numpy(kv).transpose(0, 1)


def warm_up(runner: Runner, block_size: int, max_model_len: int) -> None:
    """Compile or load every kernel before the first request comes, on block 0, which is still free."""
    for num_sequences, num_tokens in ((2, 1), (1, min(9, max_model_len))):
        _wait_for(runner, try_step(runner, block_size, num_sequences, num_tokens))


def measure(runner: Runner, block_size: int, max_model_len: int, rates: Rates) -> None:
    """Give the rates something to begin with, on block 0 too."""
    for num_sequences, num_tokens in ((1, 1), (8, 1), (1, min(64, max_model_len))):
        start = time.perf_counter()
        _wait_for(runner, try_step(runner, block_size, num_sequences, num_tokens))
        elapsed = time.perf_counter() - start
        decodes = num_sequences if num_tokens == 1 else 0
        rates.observe(decodes, 0 if decodes else num_tokens, elapsed)


def try_step(runner: Runner, block_size: int, num_sequences: int, num_tokens: int, num_computed: int = 0) -> Tensor:
    """Hidden states of a step of sequences that all consist of block 0 alone, which must be free.

    num_computed: tokens before those of the step. Positions must be within the model's tables.
    """
    step = Step()
    for index in range(num_sequences):
        length = num_computed + num_tokens
        request = Request("warm-up", [0] * length, SamplingParams(n=num_sequences), 0, 1)
        sequence = request.sequences[index]
        sequence.num_computed = num_computed
        sequence.block_table = [0] * -(-length // block_size)
        (step.decodes if num_tokens == 1 else step.prefills).append(Chunk(sequence, num_tokens, True))
    return runner.forward(step)


def _wait_for(runner: Runner, hidden: Tensor) -> None:
    runner.logits(hidden, [hidden.shape[0] - 1]).cpu()
