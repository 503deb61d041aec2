"""A layer's attention over decode rows and prefill chunks at once."""

import torch
from tolerances import ATTENTION

from localpaged.kernels.attention import attention
from localpaged.kernels.attention_batch import AttentionBatch
from localpaged.kernels.paged_attention import paged_attention_reference


def test_a_mixed_batch_writes_its_tokens_and_attends_to_them() -> None:
    """Two candidates that share two blocks and a chunk of seven tokens; their K and V are not there before."""
    tables = torch.tensor([[7, 1, 4, 0], [7, 1, 6, 0], [3, 5, 0, 0]], dtype=torch.int32)
    lens = torch.tensor([37, 35, 20], dtype=torch.int32)
    whole_k, whole_v = torch.full((8, 3, 16, 64), torch.nan), torch.full((8, 3, 16, 64), torch.nan)
    for table, length in zip(tables.tolist(), lens.tolist(), strict=True):
        for position in range(length):
            whole_k[table[position // 16], :, position % 16] = torch.randn(3, 64)
            whole_v[table[position // 16], :, position % 16] = torch.randn(3, 64)
    positions = torch.tensor([36, 34, *range(13, 20)])
    rows = torch.tensor([0, 1] + [2] * 7)
    blocks, offsets = tables[rows, positions // 16].long(), positions % 16
    k, v = whole_k[blocks, :, offsets].clone(), whole_v[blocks, :, offsets].clone()
    k_cache, v_cache = whole_k.clone(), whole_v.clone()
    k_cache[blocks, :, offsets] = v_cache[blocks, :, offsets] = torch.nan
    q = torch.randn(9, 9, 64)
    batch = AttentionBatch(
        slots=blocks * 16 + offsets,
        positions=positions,
        num_decode=2,
        decode_block_tables=tables[:2],
        decode_context_lens=lens[:2],
        group_starts=torch.tensor([0, 2], dtype=torch.int32),
        group_shared_blocks=torch.tensor([2], dtype=torch.int32),
        prefill_starts=torch.tensor([2, 9], dtype=torch.int32),
        prefill_block_tables=tables[2:],
        prefill_context_lens=lens[2:],
    )
    out = attention(q, k, v, k_cache, v_cache, batch, scale=0.125)
    assert torch.equal(k_cache.isnan(), whole_k.isnan())
    assert torch.equal(k_cache.nan_to_num(), whole_k.nan_to_num())
    assert torch.equal(v_cache.nan_to_num(), whole_v.nan_to_num())
    # Each token attends as a decode row does whose context ends with it.
    context_lens = (positions + 1).int()
    expected = paged_attention_reference(q, whole_k, whole_v, tables[rows], context_lens, scale=0.125)
    assert (out - expected).abs().max() < ATTENTION
