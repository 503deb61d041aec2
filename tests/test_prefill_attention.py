"""Prefill attention against its reference: chunks of several sequences, causal, with poison past each end."""

import random

import pytest
import torch
from tolerances import ATTENTION

from localpaged.kernels.prefill_attention import prefill_attention, prefill_attention_reference

# (tokens before the chunk, tokens in the chunk) of each sequence
CHUNKS = [[(0, 1)], [(0, 40)], [(15, 1), (16, 1), (17, 33)], [(0, 16), (100, 7), (31, 65)], [(0, 200)]]


def make(
    chunks: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, block_size: int
) -> tuple[torch.Tensor, ...]:
    rng = random.Random(1)
    torch.manual_seed(1)
    lens = [before + new for before, new in chunks]
    num_blocks = sum(-(-length // block_size) for length in lens) + 3
    free = list(range(num_blocks))
    rng.shuffle(free)
    shape = (num_blocks, kv_heads, block_size, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    tables = []
    for length in lens:
        tables.append([free.pop() for _ in range(-(-length // block_size))])
        for position in range(length):
            block, offset = tables[-1][position // block_size], position % block_size
            k_cache[block, :, offset] = torch.randn(kv_heads, head_dim)
            v_cache[block, :, offset] = torch.randn(kv_heads, head_dim)
    width = max(map(len, tables))
    block_tables = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
    starts = torch.tensor([0, *(sum(new for _, new in chunks[: i + 1]) for i in range(len(chunks)))], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), heads, head_dim) * 2
    return q, k_cache, v_cache, block_tables, starts, torch.tensor(lens, dtype=torch.int32)


def check(inputs: tuple[torch.Tensor, ...], window: int | None = None, softcap: float | None = None) -> None:
    scale = inputs[0].shape[2] ** -0.5
    expected = prefill_attention_reference(*inputs, scale=scale, window=window, softcap=softcap)
    out = prefill_attention(*inputs, scale=scale, window=window, softcap=softcap)
    assert not expected.isnan().any()
    assert (out - expected).abs().max() < ATTENTION


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_equal_the_reference(chunks: list[tuple[int, int]]) -> None:
    check(make(chunks, 6, 2, 64, 16))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 4, 64, 16), (9, 3, 64, 8), (8, 2, 80, 16), (8, 1, 128, 16), (6, 2, 64, 128)],
)
def test_head_counts_and_sizes_and_block_sizes(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    check(make(CHUNKS[3], heads, kv_heads, head_dim, block_size))


@pytest.mark.parametrize("window", [1, 9, 64])
def test_a_window_hides_what_is_behind_it(window: int) -> None:
    check(make(CHUNKS[3], 6, 2, 64, 16), window=window)


def test_soft_capping() -> None:
    check(make(CHUNKS[3], 6, 2, 64, 16), softcap=5.0)
