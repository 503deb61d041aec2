"""One step's query tokens and their KV on a GPU, with the attention's segments planned on the host.

The counterpart of AttentionBatch for Triton kernels: all tensors are views of one buffer that one copy fills, at
addresses that stay, so that a captured graph reads each step's content.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlanTensors:
    """An AttentionPlan on the device; segments past its own are empty (end_key 0).

    segments int32 [S, SEGMENT_FIELDS], ranges int32 [rows, RANGE_FIELDS]
    split: whether the rows' segments are merged; where not, each row has at most one
    shares: whether rows of a group are packed, which wants a higher tile
    """

    segments: Tensor
    ranges: Tensor
    split: bool
    shares: bool


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """T query tokens: D decode rows, then the rows of P chunks.

    slots: int32 [T], block * block_size + offset of the slot that takes the token's K and V, -1 for none
    positions: int32 [T], in its own sequence, from 0
    limits: int32 [T], how many keys the token sees, from the first one on: its position plus 1; 0 for none
    tables: int32 [D + P, W], block tables of the decode rows, then of the chunks
    num_decode: D
    decode, prefill: the segments for each window (None: no window) that a layer has; empty where there are no rows
    last: int64 [D + P], the decode rows and the last row of every chunk, None when these are all rows
    """

    slots: Tensor
    positions: Tensor
    limits: Tensor
    tables: Tensor
    num_decode: int
    decode: dict[int | None, PlanTensors]
    prefill: dict[int | None, PlanTensors]
    last: Tensor | None

    def last_rows(self) -> Tensor | None:
        """int64 [D + P], or None when every row is one."""
        return self.last
