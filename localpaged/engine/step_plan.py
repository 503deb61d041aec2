"""Plans a step's attention for each window that a layer has, with the tiles that the kernels will be launched with.

Knows lengths, groups and sizes; neither sequences nor tensors.
"""

from dataclasses import dataclass

import numpy as np

from localpaged.kernels import attention_plan, tile_config
from localpaged.kernels.attention_plan import AttentionPlan, Ints, plan_decode, plan_prefill
from localpaged.kernels.tile_config import PROGRAMS_EACH

Plans = dict[int | None, AttentionPlan]
"""A plan for each window, None for none."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What planning needs to know of a model and a card. windows: every window that a layer has, None for none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    block_size: int
    element_bytes: int
    capability: int
    num_multiprocessors: int

    @property
    def repeats(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def target_segments(self) -> int:
        """Segments that keep the device busy; each has a program for every KV head."""
        return -(-self.num_multiprocessors * PROGRAMS_EACH // self.num_kv_heads)

    def decode_segments_at_most(self, num_rows: int) -> int:
        return 2 * num_rows + self.target_segments


@dataclass(frozen=True, slots=True)
class StepPlan:
    """decode, prefill: empty where there are no such rows. shares: whether some group's rows are packed."""

    decode: Plans
    prefill: Plans
    shares: bool


def plan_step(
    geometry: Geometry,
    context_lens: Ints,
    chunk_sizes: list[int],
    group_starts: Ints,
    group_shared_blocks: Ints,
    share_min_keys: int | None = None,
    split_min_keys: int | None = None,
) -> StepPlan:
    """Plan decode rows, one query each, and then chunks of chunk_sizes queries.

    context_lens: int32 [D + P], the step's own tokens included; block tables are in the same order
    group_starts: int32 [G+1], row ranges of the D decode rows; group_shared_blocks: int32 [G]
    share_min_keys, split_min_keys: instead of attention_plan's
    """
    share_min_keys = attention_plan.SHARE_MIN_KEYS if share_min_keys is None else share_min_keys
    split_min_keys = attention_plan.SPLIT_MIN_KEYS if split_min_keys is None else split_min_keys
    num_decode, repeats = int(group_starts[-1]), geometry.repeats
    shares = bool((group_shared_blocks * geometry.block_size >= share_min_keys).any())
    card = (geometry.capability, geometry.element_bytes)
    decode_tile = tile_config.decode_config(geometry.head_dim, repeats, shares, *card)
    prefill_tile = tile_config.prefill_config(geometry.head_dim, repeats, *card)
    chunk_starts = num_decode + np.cumsum([0, *chunk_sizes]).astype(np.int32)
    decode: Plans = {}
    prefill: Plans = {}
    for window in geometry.windows:
        if num_decode:
            decode[window] = plan_decode(
                context_lens[:num_decode],
                group_starts,
                group_shared_blocks,
                block_size=geometry.block_size,
                window=window,
                rows_per_tile=decode_tile.rows(repeats),
                target_segments=geometry.target_segments,
                tile_keys=decode_tile.block_n,
                share_min_keys=share_min_keys,
                split_min_keys=split_min_keys,
            )
        if chunk_sizes:
            prefill[window] = plan_prefill(
                chunk_starts,
                context_lens[num_decode:],
                first_table=num_decode,
                window=window,
                rows_per_tile=prefill_tile.rows(repeats),
                target_segments=geometry.target_segments,
                tile_keys=prefill_tile.block_n,
                split_min_keys=split_min_keys,
            )
    return StepPlan(decode, prefill, shares)
