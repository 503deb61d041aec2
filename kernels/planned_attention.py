"""One layer's attention over a planned batch on a GPU: decode rows with their shared prefixes, then chunks of prompts.

q [T, H, Dh] x paged caches -> [T, H, Dh]; the tokens' own keys and values are in the cache already.
The kernels are those of segment_attention_triton.py; the reference for every row is paged_attention_reference().
"""

import torch
from torch import Tensor

from localpaged.kernels import tile_config
from localpaged.kernels.paged_kv import LayerKV
from localpaged.kernels.planned_batch import PlannedBatch


def planned_attention(
    q: Tensor,
    kv: LayerKV,
    batch: PlannedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from q [T, H, Dh], which may be a view with a row stride; returns a new [T, H, Dh].

    window: a query at position p sees the keys in (p - window, p]
    softcap: scores become softcap * tanh(score / softcap)
    Raises ValueError when the shapes do not fit.
    """
    num_tokens, num_heads, head_dim = q.shape
    if num_heads % kv.k.shape[1] or head_dim != kv.k.shape[3] or batch.limits.shape[0] != num_tokens:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a cache {tuple(kv.k.shape)} or the batch")
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        raise ValueError(f"the heads of a row must be side by side, not strided by {q.stride()}")
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    from localpaged.kernels.segment_attention_triton import attend_segments
    from localpaged.kernels.triton_target import capability

    repeats, card = num_heads // kv.k.shape[1], capability(q.device)
    num_decode = batch.num_decode
    for plans, rows in ((batch.decode, slice(0, num_decode)), (batch.prefill, slice(num_decode, num_tokens))):
        if rows.start == rows.stop:
            continue
        plan = plans[window]
        if rows.start == 0 and plans is batch.decode:
            config = tile_config.decode_config(head_dim, repeats, plan.shares, card, q.element_size())
        else:
            config = tile_config.prefill_config(head_dim, repeats, card, q.element_size())
        attend_segments(
            q[rows],
            kv,
            batch.tables,
            batch.limits[rows],
            plan,
            config,
            scale=scale,
            window=window,
            softcap=softcap,
            out=out[rows],
        )
    return out
