"""Sampling: each parameter against an independent calculation, many rows at once."""

from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from localpaged.engine import sampler
from localpaged.engine.sampler import adjust, sample
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.sequence import Request, Sequence
from localpaged.errors import InvalidRequestError

VOCAB = 4000


def make_sequence(prompt: list[int] | None = None, answer: list[int] | None = None, **params: Any) -> Sequence:
    settings = SamplingParams(**params)
    request = Request("r", prompt or [1], settings, settings.seed or 0, 100, frozenset({2}))
    sequence = request.sequences[0]
    sequence.token_ids += answer or []
    return sequence


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def filtered(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """What _draw leaves of the logits before it draws."""
    seen = []
    original = torch.Tensor.softmax
    try:
        torch.Tensor.softmax = lambda self, dim: (seen.append(self.clone()), original(self, dim))[1]  # type: ignore[method-assign]
        sampler._draw(logits, [make_sequence(**params) for _ in range(logits.shape[0])])
    finally:
        torch.Tensor.softmax = original  # type: ignore[method-assign]
    return seen[0]


@pytest.mark.parametrize("top_k", [1, 7, 300, VOCAB])
def test_top_k_keeps_what_transformers_keeps(top_k: int) -> None:
    logits = random_logits(5)
    expected = TopKLogitsWarper(top_k)(torch.empty(0), logits.clone())
    assert torch.equal(filtered(logits, top_k=top_k), expected)


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_top_p_keeps_what_transformers_keeps(top_p: float, temperature: float) -> None:
    logits = random_logits(5)
    expected = TopPLogitsWarper(top_p)(torch.empty(0), (logits / temperature).double())
    different = filtered(logits, top_p=top_p, temperature=temperature).isinf() != expected.isinf()
    # The token at the edge may fall on either side of a sum of thousands of float32 values.
    assert (different.sum(-1) <= 1).all()
    assert top_p == 0.999 or not different.any()


def test_top_k_and_top_p_and_min_p_combine_as_in_transformers() -> None:
    logits = random_logits(6)
    expected = logits / 1.5
    for warper in (TopKLogitsWarper(50), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)):
        expected = warper(torch.empty(0), expected)
    assert torch.equal(filtered(logits, temperature=1.5, top_k=50, top_p=0.8, min_p=0.1), expected)


def test_rows_keep_their_own_parameters() -> None:
    logits = random_logits(3)
    rows = [make_sequence(temperature=0.0), make_sequence(top_k=1), make_sequence(logit_bias={77: 100.0})]
    tokens = [one.token_id for one in sample(logits, rows)]
    assert tokens == [int(logits[0].argmax()), int(logits[1].argmax()), 77]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(8000, 1)
    rows = [make_sequence(answer=[0] * i, seed=3) for i in range(8000)]
    drawn = torch.tensor([one.token_id for one in sample(logits, rows)])
    counts = drawn.bincount(minlength=4) / 8000
    assert (counts - torch.tensor([0.1, 0.2, 0.3, 0.4])).abs().max() < 0.02


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((500, 50), -torch.inf)
    logits[:, 17] = 0.0
    logits[:, 49] = 0.0
    rows = [make_sequence(answer=[0] * i, seed=1) for i in range(500)]
    assert {one.token_id for one in sample(logits, rows)} == {17, 49}


def test_repetition_penalty_equals_transformers() -> None:
    logits = random_logits(1)
    sequence = make_sequence(prompt=[3, 4, 5], answer=[9, 9], repetition_penalty=1.3)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([sequence.token_ids]), logits.clone())
    assert torch.allclose(adjust(logits, [sequence]), expected)


def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    sequence = make_sequence(prompt=[3], answer=[9, 9, 8], presence_penalty=0.5, frequency_penalty=0.25)
    scores = adjust(torch.zeros(1, 20), [sequence])[0]
    assert scores[9] == -1.0
    assert scores[8] == -0.75
    assert scores[3] == 0.0


def test_no_end_before_min_tokens() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 2] = 50.0
    assert sample(logits, [make_sequence(answer=[1], min_tokens=2)])[0].token_id != 2
    assert sample(logits, [make_sequence(answer=[1, 1], min_tokens=2)])[0].token_id == 2


def test_logprobs_are_those_of_the_model_before_temperature_and_bias() -> None:
    logits = random_logits(1)
    one = sample(logits, [make_sequence(temperature=3.0, logit_bias={5: 100.0}, logprobs=2)])[0]
    expected = logits[0].log_softmax(-1)
    assert one.token_id == 5
    assert one.logprob == pytest.approx(float(expected[5]), abs=1e-5)
    assert one.logprobs is not None
    assert [entry.token_id for entry in one.logprobs.top] == expected.topk(2).indices.tolist()
    assert one.logprobs.chosen.rank == int((expected > expected[5]).sum()) + 1


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, [make_sequence(top_p=0.5, logit_bias={1: 5.0}), make_sequence(min_p=0.1)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1000),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", 2),
        ("top_k", -1),
        ("max_tokens", 0),
        ("logprobs", 21),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("stop", [""]),
        ("best_of", 65),
        ("logit_bias", {-1: 1.0}),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
