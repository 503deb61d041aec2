"""Prefill attention against its reference: chunks of several sequences, causal, with poison past each end."""

import random

import pytest
import torch
from tolerances import ATTENTION, INTEGER_ATTENTION

from localpaged.kernels import prefill_attention as module
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


@pytest.fixture(params=["float32", "integers"])
def tolerance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """All chunks take one form, whatever their length and the machine; how far it may be from the reference."""
    integers = request.param == "integers"
    monkeypatch.setattr(module, "INTEGER_TOKENS", 1 if integers else module.NO_WINDOW)
    monkeypatch.setattr(module, "INTEGER_CONTEXT", 0)
    return INTEGER_ATTENTION if integers else ATTENTION


def check(
    inputs: tuple[torch.Tensor, ...], tolerance: float, window: int | None = None, softcap: float | None = None
) -> None:
    scale = inputs[0].shape[2] ** -0.5
    expected = prefill_attention_reference(*inputs, scale=scale, window=window, softcap=softcap)
    out = prefill_attention(*inputs, scale=scale, window=window, softcap=softcap)
    assert not expected.isnan().any()
    assert (out - expected).abs().max() < tolerance


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_equal_the_reference(chunks: list[tuple[int, int]], tolerance: float) -> None:
    check(make(chunks, 6, 2, 64, 16), tolerance)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 4, 64, 16), (9, 3, 64, 8), (8, 2, 80, 16), (8, 1, 128, 16), (6, 2, 64, 128)],
)
def test_head_counts_and_sizes_and_block_sizes(
    heads: int, kv_heads: int, head_dim: int, block_size: int, tolerance: float
) -> None:
    check(make(CHUNKS[3], heads, kv_heads, head_dim, block_size), tolerance)


@pytest.mark.parametrize("window", [1, 9, 64])
def test_a_window_hides_what_is_behind_it(window: int, tolerance: float) -> None:
    check(make(CHUNKS[3], 6, 2, 64, 16), tolerance, window=window)


def test_soft_capping(tolerance: float) -> None:
    check(make(CHUNKS[3], 6, 2, 64, 16), tolerance, softcap=5.0)


def test_a_window_and_many_tiles_of_keys(tolerance: float) -> None:
    check(make([(511, 300), (0, 129)], 9, 3, 64, 8), tolerance, window=100)
    check(make([(511, 300), (0, 129)], 8, 1, 64, 16), tolerance)


def test_queries_that_are_a_view_of_the_projections_attend_alike(tolerance: float) -> None:
    q, *rest = make(CHUNKS[3], 6, 2, 64, 16)
    projections = torch.full((q.shape[0], 10, 64), torch.nan)
    projections[:, :6] = q
    check((projections[:, :6], *rest), tolerance)


def test_zero_keys_values_and_queries_attend_evenly(tolerance: float) -> None:
    q, k_cache, v_cache, *rest = make([(0, 70)], 6, 2, 64, 16)
    k_cache[:, :, 3], v_cache[:, :, 5], q[7] = 0, 0, 0
    check((q, k_cache, v_cache, *rest), tolerance)
    check((torch.zeros_like(q), k_cache, v_cache, *rest), tolerance)


def test_scores_that_only_one_key_wins_do_not_overflow(tolerance: float) -> None:
    q, k_cache, v_cache, *rest = make([(0, 150)], 3, 1, 64, 16)
    # All dimensions alike: the largest products that vectors of their length can have.
    k_cache[rest[0][0, 2], :, 4], q[:] = 40.0, 40.0
    check((q, k_cache, v_cache, *rest), tolerance)


def test_equal_weights_of_equal_values_do_not_overflow(tolerance: float) -> None:
    q, k_cache, v_cache, *rest = make([(0, 200)], 3, 1, 64, 16)
    check((torch.zeros_like(q), k_cache, v_cache * 0 + 5, *rest), tolerance)


def test_a_first_key_that_takes_most_of_the_weight_is_not_rounded(tolerance: float) -> None:
    """As in trained models: the first key's score is far above the rest, and its value is next to nothing."""
    q, k_cache, v_cache, tables, *rest = make([(0, 200)], 3, 1, 64, 16)
    q.abs_()
    k_cache[tables[0, 0], 0, 0] = 1.0
    k_cache[tables[0, 0], 0, 0, :4] = 30.0
    v_cache[tables[0, 0], 0, 0] *= 1e-3
    check((q, k_cache, v_cache, tables, *rest), tolerance / 20 if tolerance == INTEGER_ATTENTION else tolerance)


def test_what_all_keys_have_in_common_costs_no_precision(tolerance: float) -> None:
    q, k_cache, v_cache, *rest = make([(0, 200)], 3, 1, 64, 16)
    k_cache[..., :8] += 60.0
    check((q, k_cache, v_cache, *rest), tolerance)


def test_long_and_short_chunks_side_by_side_take_their_own_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTEGER_TOKENS", 64)
    monkeypatch.setattr(module, "INTEGER_CONTEXT", 73)
    inputs = make([(0, 63), (9, 64), (8, 64)], 6, 2, 64, 16)
    expected = prefill_attention_reference(*inputs, scale=0.125)
    out = prefill_attention(*inputs, scale=0.125)
    assert (out - expected).abs().max() < INTEGER_ATTENTION
    short = torch.cat([out[:63], out[127:]]) - torch.cat([expected[:63], expected[127:]])
    assert short.abs().max() < ATTENTION
    exact = prefill_attention(*inputs, scale=0.125, exact=True)
    assert (exact - expected).abs().max() < ATTENTION


def test_no_tokens_give_no_rows() -> None:
    q, k_cache, v_cache, tables, _, _ = make([(0, 5)], 6, 2, 64, 16)
    starts, lens = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    assert prefill_attention(q[:0], k_cache, v_cache, tables[:0], starts, lens, scale=1.0).shape == (0, 6, 64)


def test_shapes_that_do_not_fit_raise() -> None:
    q, k_cache, v_cache, tables, starts, lens = make([(0, 5)], 6, 2, 64, 16)
    with pytest.raises(ValueError, match="queries"):
        prefill_attention(q[:, :5], k_cache, v_cache, tables, starts, lens, scale=1.0)
    with pytest.raises(ValueError, match="1 chunks"):
        prefill_attention(q, k_cache, v_cache, tables, starts[:1], lens, scale=1.0)
