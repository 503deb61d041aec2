"""Decode attention: one query token a row against its paged context, shared blocks of a group read once.

q [D, H, Dh] x caches [num_blocks, Hkv, block_size, Dh] -> [D, H, Dh]; H is a multiple of Hkv.
A group's rows have their first `group_shared_blocks` blocks in common. These are read once for all of them
(prefix partial), each row's other blocks separately (suffix partial), and the partials are merged by their
log-sum-exp.
Source: PagedAttention (arXiv:2309.06180), section 4.3; Hydragen (arXiv:2402.05099), section 3.2, for
the split into prefix and suffix; Flash-Decoding for the merge.
Bound by memory for one row, by arithmetic for large groups; the floor is 8 * Hkv * Dh bytes a context token
that is read, and 4 * D * H * Dh operations a context token.
"""

import torch
from torch import Tensor


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Gather each row's context through its block table and attend to it, with no use of sharing."""
    block_size, repeats = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    for row, context_len in enumerate(context_lens.tolist()):
        first = 0 if window is None else max(0, context_len - window)
        token = torch.arange(first, context_len)
        blocks, offsets = block_tables[row, token // block_size].long(), token % block_size
        k = k_cache[blocks, :, offsets].float().repeat_interleave(repeats, dim=1)  # [context, H, Dh]
        v = v_cache[blocks, :, offsets].float().repeat_interleave(repeats, dim=1)
        scores = torch.einsum("hd,chd->hc", q[row].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out[row] = torch.einsum("hc,chd->hd", scores.softmax(-1), v)
    return out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    group_starts: Tensor,
    group_shared_blocks: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from each row's one query to its context.

    q: [D, H, Dh]
    k_cache, v_cache: [num_blocks, Hkv, block_size, Dh]
    block_tables: int32 [D, W]
    context_lens: int32 [D], the query's own token included, at least 1
    group_starts: int32 [G+1]; group_shared_blocks: int32 [G], leading full blocks in common
    window: a query at position p sees the keys in (p - window, p]
    softcap: scores become softcap * tanh(score / softcap)
    Returns [D, H, Dh], in `out` when it is given. Raises ValueError when the shapes do not fit.
    """
    if q.shape[1] % k_cache.shape[1] or q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a cache {tuple(k_cache.shape)}")
    if block_tables.shape[0] != q.shape[0] or context_lens.shape[0] != q.shape[0]:
        raise ValueError(
            f"{q.shape[0]} rows need as many block tables ({block_tables.shape[0]}) "
            f"and context lengths ({context_lens.shape[0]})"
        )
    if out is None:
        out = torch.empty_like(q)
    if q.shape[0] == 0:
        return out
    reference = paged_attention_reference(
        q, k_cache, v_cache, block_tables, context_lens, scale=scale, window=window, softcap=softcap
    )
    return out.copy_(reference)
