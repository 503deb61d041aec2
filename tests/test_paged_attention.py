"""Decode attention against its reference: scattered tables, groups, poison in every slot that must not be read."""

import random

import pytest
import torch
from tolerances import ATTENTION

from localpaged.kernels.paged_attention import paged_attention, paged_attention_reference

# One list a group: how many leading blocks its rows share, then each row's context length in tokens.
GROUPS = [
    [(0, [1])],
    [(0, [16])],
    [(0, [33]), (0, [7]), (0, [128])],
    [(2, [33, 40, 64])],
    [(3, [49, 50, 63, 64, 48 + 1]), (0, [5]), (1, [17, 200]), (0, [16])],
    [(4, [65] * 8)],
    [(7, [130 + i for i in range(17)])],
]


def make(
    groups: list[tuple[int, list[int]]], heads: int, kv_heads: int, head_dim: int, block_size: int, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Inputs whose contexts are scattered over a pool in which all else is NaN."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    # Lengths are given for blocks of 16; the same number of blocks is shared whatever their size.
    scale = block_size / 16
    lens = [[max(int(length * scale), shared * block_size + 1) for length in rows] for shared, rows in groups]
    num_blocks = sum(-(-length // block_size) for rows in lens for length in rows) + 7
    free = list(range(num_blocks))
    rng.shuffle(free)
    shape = (num_blocks, kv_heads, block_size, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    tables: list[list[int]] = []
    for (shared, _), rows in zip(groups, lens, strict=True):
        prefix = [free.pop() for _ in range(shared)]
        for length in rows:
            own = -(-length // block_size) - shared
            tables.append(prefix + [free.pop() for _ in range(own)])
            for position in range(length):
                block, offset = tables[-1][position // block_size], position % block_size
                if k_cache[block, 0, offset, 0].isnan():
                    k_cache[block, :, offset] = torch.randn(kv_heads, head_dim)
                    v_cache[block, :, offset] = torch.randn(kv_heads, head_dim)
    width = max(map(len, tables))
    block_tables = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
    context_lens = torch.tensor([length for rows in lens for length in rows], dtype=torch.int32)
    starts = [0]
    for _, rows in groups:
        starts.append(starts[-1] + len(rows))
    shared_blocks = torch.tensor([shared for shared, _ in groups], dtype=torch.int32)
    q = torch.randn(len(tables), heads, head_dim) * 2
    return q, k_cache, v_cache, block_tables, context_lens, torch.tensor(starts, dtype=torch.int32), shared_blocks


def check(inputs: tuple[torch.Tensor, ...], **settings: float | int | None) -> None:
    q = inputs[0]
    scale = q.shape[2] ** -0.5
    expected = paged_attention_reference(*inputs[:5], scale=scale, **settings)  # type: ignore[arg-type]
    out = torch.full_like(q, torch.nan)
    returned = paged_attention(*inputs, scale=scale, out=out, **settings)  # type: ignore[arg-type]
    assert not expected.isnan().any()
    assert (out - expected).abs().max() < ATTENTION
    assert torch.equal(returned, out)


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_groups_equal_the_reference(groups: list[tuple[int, list[int]]]) -> None:
    check(make(groups, 6, 2, 64, 16))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 4, 64, 16), (9, 3, 64, 8), (8, 2, 80, 16), (8, 1, 128, 16), (6, 2, 64, 128), (2, 1, 96, 32), (16, 2, 64, 8)],
)
def test_head_counts_and_sizes_and_block_sizes(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    check(make(GROUPS[4], heads, kv_heads, head_dim, block_size))
    check(make(GROUPS[4], heads, kv_heads, head_dim, block_size), window=5, softcap=5.0)


@pytest.mark.parametrize("window", [1, 5, 16, 50, 10_000])
def test_a_window_hides_what_is_behind_it(window: int) -> None:
    check(make(GROUPS[4], 6, 2, 64, 16), window=window)


def test_soft_capping() -> None:
    check(make(GROUPS[4], 6, 2, 64, 16), softcap=5.0)


def test_a_group_gives_what_its_rows_give_alone() -> None:
    q, k, v, tables, lens, starts, shared = make([(3, [50, 61, 64])], 6, 2, 64, 16)
    together = paged_attention(q, k, v, tables, lens, starts, shared, scale=0.125)
    singles = torch.arange(4, dtype=torch.int32)
    alone = paged_attention(q, k, v, tables, lens, singles, torch.zeros(3, dtype=torch.int32), scale=0.125)
    assert (together - alone).abs().max() < ATTENTION


def test_large_scores_do_not_overflow() -> None:
    inputs = make(GROUPS[3], 6, 2, 64, 16)
    check((inputs[0] * 300, *inputs[1:]))


def test_shapes_that_do_not_fit_raise() -> None:
    inputs = make([(0, [5])], 6, 2, 64, 16)
    with pytest.raises(ValueError, match="q"):
        paged_attention(torch.randn(1, 5, 64), *inputs[1:], scale=1.0)
