"""Turns a step of the scheduler into the tensors that the model takes."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localpaged.engine.scheduler import Chunk, Step
from localpaged.engine.step_input import group_rows
from localpaged.kernels.attention_batch import AttentionBatch

Ints = NDArray[np.int32]


def build_input(step: Step, block_size: int) -> tuple[Tensor, AttentionBatch]:
    """token_ids int64 [T] and where their KV is: decode rows first, candidates of one request side by side."""
    chunks = step.chunks
    token_ids: list[int] = []
    positions = np.empty(step.num_tokens, dtype=np.int64)
    slots = np.empty(step.num_tokens, dtype=np.int64)
    ends = []
    for chunk in chunks:
        sequence = chunk.sequence
        first = sequence.num_computed
        begin, end = len(token_ids), len(token_ids) + chunk.num_tokens
        token_ids += sequence.token_ids[first : first + chunk.num_tokens]
        if chunk.num_tokens == 1:
            block, offset = divmod(first, block_size)
            positions[begin] = first
            slots[begin] = sequence.block_table[block] * block_size + offset
        else:
            positions[begin:end] = np.arange(first, first + chunk.num_tokens)
            blocks, offsets = np.divmod(positions[begin:end], block_size)
            slots[begin:end] = np.asarray(sequence.block_table, dtype=np.int64)[blocks] * block_size + offsets
        ends.append(end)
    num_decode = len(step.decodes)
    decode_lens, decode_tables = _tables(step.decodes, block_size)
    prefill_lens, prefill_tables = _tables(step.prefills, block_size)
    decoding = [chunk.sequence for chunk in step.decodes]
    starts, shared = group_rows(decoding, decode_lens, decode_tables, block_size)
    attention = AttentionBatch(
        slots=torch.from_numpy(slots),
        positions=torch.from_numpy(positions),
        num_decode=num_decode,
        decode_block_tables=torch.from_numpy(decode_tables),
        decode_context_lens=torch.from_numpy(decode_lens),
        group_starts=torch.from_numpy(starts),
        group_shared_blocks=torch.from_numpy(shared),
        prefill_starts=torch.tensor([num_decode, *ends[num_decode:]], dtype=torch.int32),
        prefill_block_tables=torch.from_numpy(prefill_tables),
        prefill_context_lens=torch.from_numpy(prefill_lens),
    )
    return torch.tensor(token_ids), attention


def _tables(chunks: list[Chunk], block_size: int) -> tuple[Ints, Ints]:
    """Context lengths [C] after the step, and block tables [C, W] padded with block 0."""
    lens = np.array([chunk.sequence.num_computed + chunk.num_tokens for chunk in chunks], dtype=np.int32)
    width = int(lens.max() + block_size - 1) // block_size if len(chunks) else 0
    tables = np.zeros((len(chunks), width), dtype=np.int32)
    for row, chunk in enumerate(chunks):
        table = chunk.sequence.block_table[:width]
        tables[row, : len(table)] = table
    return lens, tables
