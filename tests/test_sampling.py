"""Sampling on the device: the Triton kernels against the plain reference.

Inputs are fresh in each run. Where float32 and float64 sums may fall on either side of an edge, a token other than the
reference's must be the one that a hair's breadth away from the edge would be drawn.
"""

import secrets
from dataclasses import replace
from typing import Any

import interpreter  # noqa: F401
import pytest
import torch
from torch import Tensor

from localpaged.engine.philox import uniforms
from localpaged.kernels.sampling import (
    Adjustments,
    SamplingRows,
    adjusted_reference,
    kept_weights_reference,
    sample_rows,
    sample_rows_reference,
    uniform_reference,
)

pytest.importorskip("triton", reason="there is no Triton for this system")

DRAW_EDGE = 1e-5
FILTER_EDGE = 1e-6
LOGPROB = 1e-4
# Positions at which candidate 0 of seed 1 draws the words 0, 2^31 and 2^32 - 1: numbers 0, 1/2 and just below 1.
LOWEST, HALF, HIGHEST = 91093890, 1745050128, 1711450034

FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 5},
    {"temperature": 2.0, "top_p": 0.9},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


def make_rows(draws: list[dict[str, Any]], generator: torch.Generator, num_rows: int = 1) -> SamplingRows:
    """Parameters of draws from random rows of num_rows, with random seeds, candidates and positions."""
    size = (len(draws),)

    def column(name: str, off: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([draw.get(name, off) for draw in draws], dtype=dtype)

    return SamplingRows(
        logits_row=torch.randint(num_rows, size, generator=generator, dtype=torch.int32),
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seed=torch.randint(-(2**63), 2**63 - 1, size, generator=generator),
        candidate=torch.randint(64, size, generator=generator, dtype=torch.int32),
        position=torch.randint(2**31 - 1, size, generator=generator, dtype=torch.int32),
    )


def at_positions(rows: SamplingRows, positions: list[int]) -> SamplingRows:
    """The same draws as candidate 0 of seed 1 at the positions."""
    zeros = torch.zeros_like(rows.candidate)
    position = torch.tensor(positions, dtype=torch.int32)
    return replace(rows, seed=torch.ones_like(rows.seed), candidate=zeros, position=position)


def random_logits(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """float32 [rows, vocab], inside a wider tensor of NaN that no kernel may read."""
    wide = torch.full((rows, vocab + 3), torch.nan)
    wide[:, :vocab] = torch.randn(rows, vocab, generator=generator) * 3
    return wide[:, :vocab]


def explained(
    token: int, scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> bool:
    """Whether the token is within DRAW_EDGE of being drawn, by filters moved by at most FILTER_EDGE."""
    for hair in (0.0, -FILTER_EDGE, FILTER_EDGE):
        moved = min(1.0, top_p + hair) if top_p < 1.0 else 1.0
        weights = kept_weights_reference(scores, temperature, top_k, moved, min_p * (1 + hair))
        cumulative = weights.cumsum(0) / weights.sum()
        before = float(cumulative[token] - weights[token] / weights.sum())
        if weights[token] > 0 and before - DRAW_EDGE <= uniform <= float(cumulative[token]) + DRAW_EDGE:
            return True
    return False


def assert_drawn_like_the_reference(logits: Tensor, rows: SamplingRows, chunk_size: int) -> Tensor:
    """The kernels' tokens, checked with their log-probabilities; what they write to starts as rubbish."""
    before = logits.clone()
    out = torch.full((2, len(rows.logits_row)), -7, dtype=torch.int32)
    token_ids, logprobs = sample_rows(logits, rows, out, chunk_size)
    expected_ids, _ = sample_rows_reference(logits, rows)
    assert torch.equal(logits, before)
    assert out.data_ptr() == token_ids.data_ptr()
    assert torch.equal(out[1].view(torch.float32), logprobs)
    for draw, (token, expected) in enumerate(zip(token_ids.tolist(), expected_ids.tolist(), strict=True)):
        if token == expected:
            continue
        one = [getattr(rows, name)[draw].item() for name in ("temperature", "top_k", "top_p", "min_p")]
        uniform = uniform_reference(*(int(getattr(rows, name)[draw]) for name in ("seed", "candidate", "position")))
        scores = adjusted_reference(logits, rows)[draw]
        assert one[0] > 0, f"greedy draw {draw} took {token}, not {expected}"
        assert explained(token, scores, *one, uniform), (
            f"draw {draw} took token {token}, not {expected}: temperature, top_k, top_p, min_p {one}, "
            f"uniform {uniform}, vocabulary {logits.shape[1]}, chunks of {chunk_size}"
        )
    model = logits.double().log_softmax(-1)[rows.logits_row.long(), token_ids.long()]
    torch.testing.assert_close(logprobs.double(), model, atol=LOGPROB, rtol=0)
    return token_ids


def test_the_reference_draws_the_numbers_of_philox() -> None:
    seeds = [secrets.randbits(64) for _ in range(20)]
    expected = uniforms(seeds, list(range(20)), list(range(5, 25)))
    assert [uniform_reference(seed, i, i + 5) for i, seed in enumerate(seeds)] == expected.tolist()


def test_the_reference_follows_the_distribution() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    rows = make_rows([{}] * 2000, torch.Generator().manual_seed(1))
    rows = replace(rows, seed=torch.full_like(rows.seed, 3), position=torch.arange(2000, dtype=torch.int32))
    drawn, _ = sample_rows_reference(probabilities.log()[None], rows)
    assert (drawn.bincount(minlength=4) / 2000 - probabilities).abs().max() < 0.04


@pytest.mark.parametrize(("vocab", "chunk_size"), [(1, 16), (37, 16), (5000, 4096), (50257, 32768)])
def test_mixed_draws_from_shared_rows_equal_the_reference(vocab: int, chunk_size: int, fresh: torch.Generator) -> None:
    logits = random_logits(3, vocab, fresh)
    assert_drawn_like_the_reference(logits, make_rows(FILTERS, fresh, 3), chunk_size)


def test_filters_keep_exactly_what_the_reference_keeps(fresh: torch.Generator) -> None:
    draws = [{"temperature": 100.0, "top_k": k} for k in (2, 3, 20, 36)]
    draws += [{"temperature": 3.0, "top_p": p} for p in (0.3, 0.7, 0.95)]
    draws += [{"temperature": 100.0, "min_p": p} for p in (0.97, 0.9)]
    draws += [
        {"temperature": 100.0, "top_k": 20, "top_p": 0.5, "min_p": 0.9},
        {"temperature": 3.0, "top_k": 2**31 - 1, "top_p": 0.5},
        {"temperature": 1e-5},
    ]
    # In descending order, a number just below 1 draws the least likely token that is kept.
    logits = random_logits(4, 37, fresh).sort(-1, descending=True).values
    assert_drawn_like_the_reference(logits, at_positions(make_rows(draws, fresh, 4), [HIGHEST] * len(draws)), 32)


def test_all_greedy_draws_take_the_likeliest(fresh: torch.Generator) -> None:
    logits = random_logits(5, 1000, fresh)
    # Filters do not matter at temperature 0.
    draws = [{"temperature": 0.0, "top_k": 7, "top_p": 0.3, "min_p": 0.5}] * 7
    rows = make_rows(draws, fresh, 5)
    token_ids = assert_drawn_like_the_reference(logits, rows, 256)
    assert token_ids.tolist() == logits.argmax(-1)[rows.logits_row.long()].tolist()


def test_a_filter_that_leaves_one_token_draws_it(fresh: torch.Generator) -> None:
    logits = random_logits(3, 300, fresh)
    rows = make_rows([{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-6}], fresh, 3)
    token_ids, _ = sample_rows(logits, rows, chunk_size=128)
    assert token_ids.tolist() == logits.argmax(-1)[rows.logits_row.long()].tolist()


def test_a_tie_for_the_likeliest_goes_to_the_lowest_token() -> None:
    logits = torch.zeros(2, 200)
    logits[0, [190, 70, 131]] = 1.0
    rows = make_rows([{"temperature": 0.0}] * 2, torch.Generator())
    rows = replace(rows, logits_row=torch.tensor([0, 1], dtype=torch.int32))
    token_ids, _ = sample_rows(logits, rows, chunk_size=64)
    assert token_ids.tolist() == [70, 0]


def test_ties_at_an_edge_all_stay(fresh: torch.Generator) -> None:
    # Four values only, two of them zeros of either sign: every edge is a tie, and those of zero are one.
    values = torch.tensor([-1.5, -0.0, 0.0, 2.0])
    logits = values[torch.randint(4, (3, 90), generator=fresh)]
    draws = [{"top_k": 2}, {"top_k": 40}, {"top_p": 0.6}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.1}, {"top_k": 60}]
    assert_drawn_like_the_reference(logits, make_rows(draws, fresh, 3), 64)


def test_an_edge_at_negative_zero_leaves_out_what_is_below() -> None:
    logits = torch.full((1, 64), -1.5)
    logits[0, 11] = -0.0
    rows = at_positions(make_rows([{"top_k": 1, "temperature": 50.0}] * 2, torch.Generator()), [LOWEST, HIGHEST])
    assert sample_rows(logits, rows, chunk_size=64)[0].tolist() == [11, 11]


def test_a_token_of_probability_zero_is_never_drawn(fresh: torch.Generator) -> None:
    logits = torch.full((1, 50), -torch.inf)
    logits[0, [17, 49]] = 0.0
    draws = [{}, {"top_k": 30}, {"top_p": 0.99}, {"min_p": 0.01}, {"temperature": 0.0}]
    rows = make_rows(draws * 2, fresh)
    token_ids = assert_drawn_like_the_reference(logits, rows, 32)
    assert set(token_ids.tolist()) <= {17, 49}


@pytest.mark.parametrize("filters", [{}, {"top_k": 94, "top_p": 0.9}])
def test_the_ends_and_the_middle_draw_tokens_with_probability(filters: dict[str, Any]) -> None:
    # The masses are whole numbers: the middle lies exactly between tokens 49 and 50.
    logits = torch.full((1, 100), -torch.inf)
    logits[0, 3:97] = 0.0
    rows = at_positions(make_rows([filters] * 3, torch.Generator()), [LOWEST, HALF, HIGHEST])
    token_ids, _ = sample_rows(logits, rows, chunk_size=32)
    assert token_ids.tolist() == [3, 50, 96]


def make_adjustments(num_draws: int, vocab: int, draws: list[int], generator: torch.Generator) -> Adjustments:
    """Entries for a third of the vocabulary of each of the draws, in no order."""

    def whole(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator, dtype=torch.int32)

    places = torch.cartesian_prod(torch.tensor(draws, dtype=torch.int32), torch.arange(vocab, dtype=torch.int32))
    places = places[torch.randperm(len(places), generator=generator)[: len(places) // 3]].contiguous()
    size = len(places)
    bias = torch.randn(size, generator=generator)
    bias[whole(0, size, size // 9).long()] = -torch.inf
    return Adjustments(
        draws=torch.tensor(draws, dtype=torch.int32),
        entry_row=places[:, 0].contiguous(),
        token=places[:, 1].contiguous(),
        seen=whole(0, 2, size),
        count=whole(0, 4, size),
        bias=bias,
        repetition_penalty=torch.rand(num_draws, generator=generator) + 0.7,
        presence_penalty=torch.rand(num_draws, generator=generator) * 2 - 1,
        frequency_penalty=torch.rand(num_draws, generator=generator) - 0.5,
    )


def test_adjusted_draws_equal_the_reference_and_others_stay_as_they_are(fresh: torch.Generator) -> None:
    logits = random_logits(2, 333, fresh)
    # Draw 4 has no entries; the others' copies are not in the order of the draws.
    rows = make_rows([*FILTERS, {"temperature": 0.0}], fresh, 2)
    rows = replace(rows, adjustments=make_adjustments(7, 333, [5, 0, 6, 2, 3, 1], fresh))
    assert_drawn_like_the_reference(logits, rows, 128)


def test_an_entry_for_a_token_that_the_vocabulary_lacks_changes_nothing(fresh: torch.Generator) -> None:
    rows = make_rows([{"temperature": 0.0}] * 2, fresh)
    table = make_adjustments(2, 40, [0, 1], fresh)
    # Written all the same, they would lie in the other draw's copy.
    table = replace(table, token=table.token + torch.where(table.entry_row == 0, 40, -40).to(torch.int32))
    assert sample_rows(torch.zeros(1, 40), replace(rows, adjustments=table), chunk_size=16)[0].tolist() == [0, 0]


def test_no_draws_give_no_tokens_and_what_does_not_fit_is_named() -> None:
    assert [len(part) for part in sample_rows(torch.zeros(0, 8), make_rows([], torch.Generator()))] == [0, 0]
    logits, rows = torch.zeros(2, 8), make_rows([{}, {}], torch.Generator())
    table = replace(make_adjustments(2, 8, [0, 1], torch.Generator()), bias=torch.ones(1))
    for wrong, name in (
        (replace(rows, top_k=torch.zeros(3, dtype=torch.int32)), "top_k"),
        (replace(rows, seed=torch.zeros(2, dtype=torch.int32)), "seed"),
        (replace(rows, temperature=torch.zeros(4)[::2]), "temperature"),
        (replace(rows, adjustments=table), "bias"),
    ):
        with pytest.raises(ValueError, match=name):
            sample_rows(logits, wrong)
    for bad in (logits.double(), torch.zeros(8), torch.zeros(2, 0), torch.zeros(8, 2).T, torch.zeros(0, 8)):
        with pytest.raises(ValueError, match="logits"):
            sample_rows(bad, rows)
    with pytest.raises(ValueError, match="out"):
        sample_rows(logits, rows, torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="chunk_size"):
        sample_rows(logits, rows, chunk_size=48)
