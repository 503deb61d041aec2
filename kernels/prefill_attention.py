"""Prefill attention: chunks of query tokens against their paged context, causally.

q [T', H, Dh] x caches [num_blocks, Hkv, block_size, Dh] -> [T', H, Dh]; the chunks' own tokens are in
the cache already. Source: "Attention Is All You Need", section 3.2 (arXiv:1706.03762); FlashAttention
(arXiv:2205.14135) for the fused product.
Bound by arithmetic: 4 * H * Dh operations for each pair of a query and a key that it sees.
"""

import torch
from torch import Tensor


def prefill_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Gather each chunk's context through its block table and attend to it with a full score matrix."""
    block_size, repeats = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    bounds = starts.tolist()
    for chunk, context_len in enumerate(context_lens.tolist()):
        start, end = bounds[chunk], bounds[chunk + 1]
        token = torch.arange(context_len)
        blocks, offsets = block_tables[chunk, token // block_size].long(), token % block_size
        k = k_cache[blocks, :, offsets].float().repeat_interleave(repeats, dim=1)  # [context, H, Dh]
        v = v_cache[blocks, :, offsets].float().repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,chd->hqc", q[start:end].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(context_len - (end - start), context_len)[:, None]
        visible = token <= position
        if window is not None:
            visible &= token > position - window
        scores = scores.masked_fill(~visible, float("-inf"))
        out[start:end] = torch.einsum("hqc,chd->qhd", scores.softmax(-1), v)
    return out


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from the tokens of P chunks to their contexts, causally.

    q: [T', H, Dh], chunk after chunk
    k_cache, v_cache: [num_blocks, Hkv, block_size, Dh], the chunks' own tokens included
    block_tables: int32 [P, Wp]
    starts: int32 [P+1], each chunk's range in q's rows
    context_lens: int32 [P], context after the chunk, the chunk included
    window: a query at position p sees the keys in (p - window, p]
    softcap: scores become softcap * tanh(score / softcap)
    Returns [T', H, Dh]. Raises ValueError when the shapes do not fit.
    """
    if q.shape[1] % k_cache.shape[1] or q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a cache {tuple(k_cache.shape)}")
    if starts.shape[0] != context_lens.shape[0] + 1 or block_tables.shape[0] != context_lens.shape[0]:
        raise ValueError(
            f"{context_lens.shape[0]} chunks need as many block tables ({block_tables.shape[0]}) "
            f"and one more start ({starts.shape[0]})"
        )
    if q.shape[0] == 0:
        return torch.empty_like(q)
    return prefill_attention_reference(
        q, k_cache, v_cache, block_tables, starts, context_lens, scale=scale, window=window, softcap=softcap
    )
