"""How one step's query tokens map to the paged KV cache.

Knows nothing of sequences, requests or models: only slots, tables and lengths.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's T query tokens: D decode rows first, then P prefill chunks one after another.

    slots: int64 [T], block * block_size + offset of the slot that takes the token's K and V
    positions: int64 [T], position in its own sequence, from 0
    num_decode: D, the tokens that are the only query of their sequence; rows of one group are adjacent
    decode_block_tables: int32 [D, W], entries past a row's context are arbitrary
    decode_context_lens: int32 [D], tokens of context, the query's own token included
    group_starts: int32 [G+1], row ranges of the groups; a row that shares nothing is a group of one
    group_shared_blocks: int32 [G], leading full blocks that all rows of the group have in common
    prefill_starts: int32 [P+1], each chunk's range in the T tokens; the first entry is D
    prefill_block_tables: int32 [P, Wp]
    prefill_context_lens: int32 [P], tokens of context, the chunk included
    """

    slots: Tensor
    positions: Tensor
    num_decode: int
    decode_block_tables: Tensor
    decode_context_lens: Tensor
    group_starts: Tensor
    group_shared_blocks: Tensor
    prefill_starts: Tensor
    prefill_block_tables: Tensor
    prefill_context_lens: Tensor

    def last_rows(self) -> Tensor | None:
        """int64 [D+P]: the decode rows, and the last row of every chunk; None when these are all rows."""
        if self.prefill_context_lens.shape[0] == 0:
            return None
        return torch.cat(
            [torch.arange(self.num_decode, device=self.prefill_starts.device), self.prefill_starts[1:].long() - 1]
        )

    def for_last_rows(self) -> "AttentionBatch":
        """The batch whose queries are last_rows() alone; the KV of all T tokens still goes to slots."""
        num_chunks = self.prefill_context_lens.shape[0]
        end, device = self.num_decode + num_chunks + 1, self.prefill_starts.device
        starts = torch.arange(self.num_decode, end, dtype=torch.int32, device=device)
        return replace(self, prefill_starts=starts)
