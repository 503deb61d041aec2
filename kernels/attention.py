"""One layer's attention over a mixed batch: write K and V, then decode rows, then prefill chunks.

q [T, H, Dh], k and v [T, Hkv, Dh], caches [num_blocks, Hkv, block_size, Dh] -> [T, H, Dh].
"""

import torch
from torch import Tensor

from localpaged.kernels.attention_batch import AttentionBatch
from localpaged.kernels.paged_attention import paged_attention
from localpaged.kernels.prefill_attention import prefill_attention
from localpaged.kernels.write_kv import write_kv


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    exact: bool = False,
) -> Tensor:
    """Write k and v [T, Hkv, Dh] to batch.slots, then attend from q [T, H, Dh] to each token's context.

    exact: float32 products throughout. Returns [T, H, Dh]. The caches change in place.
    """
    write_kv(k, v, k_cache, v_cache, batch.slots)
    num_decode = batch.num_decode
    if num_decode == 0:
        return prefill_attention(
            q,
            k_cache,
            v_cache,
            batch.prefill_block_tables,
            batch.prefill_starts,
            batch.prefill_context_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            exact=exact,
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    paged_attention(
        q[:num_decode],
        k_cache,
        v_cache,
        batch.decode_block_tables,
        batch.decode_context_lens,
        batch.group_starts,
        batch.group_shared_blocks,
        scale=scale,
        window=window,
        softcap=softcap,
        out=out[:num_decode],
    )
    if num_decode < q.shape[0]:
        out[num_decode:] = prefill_attention(
            q[num_decode:],
            k_cache,
            v_cache,
            batch.prefill_block_tables,
            batch.prefill_starts - num_decode,
            batch.prefill_context_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            exact=exact,
        )
    return out
