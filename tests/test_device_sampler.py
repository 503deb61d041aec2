"""The sampler of a device, on Triton's interpreter, against the one of the CPU: the same tokens for every parameter."""

import secrets
from typing import Any

import interpreter  # noqa: F401
import pytest
import torch
from test_sampling import LOGPROB, explained, random_logits
from torch import Tensor

from localpaged.engine import device_sampler
from localpaged.engine.device_sampler import DeviceSampler
from localpaged.engine.philox import uniforms
from localpaged.engine.sampler import Sample, adjust, sample
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.sequence import Request, Sequence
from localpaged.kernels.sampling import SamplingRows

EOS = 2


def make_sequence(prompt: list[int] | None = None, answer: list[int] | None = None, **params: Any) -> Sequence:
    settings = SamplingParams(**params)
    seed = settings.seed if settings.seed is not None else secrets.randbits(64)
    sequence = Request("r", prompt or [1], settings, seed, 100, frozenset({EOS})).sequences[-1]
    sequence.token_ids += answer or []
    return sequence


def draw_on_device(logits: Tensor, rows: list[int], sequences: list[Sequence]) -> list[Sample]:
    return DeviceSampler(torch.device("cpu")).launch(logits, rows, sequences).result()


def assert_drawn_like_the_sampler(logits: Tensor, rows: list[int], sequences: list[Sequence]) -> list[Sample]:
    """What the device drew, checked against sampler.py: tokens, log-probabilities and reports."""
    drawn, expected = draw_on_device(logits, rows, sequences), sample(logits[rows], sequences)
    scores = adjust(logits[rows], sequences)
    for place, (one, other) in enumerate(zip(drawn, expected, strict=True)):
        sequence, params = sequences[place], sequences[place].request.params
        if one.token_id != other.token_id:
            assert not params.greedy, f"greedy draw {place} took {one.token_id}, not {other.token_id}"
            [uniform] = uniforms([sequence.request.seed], [sequence.index], [sequence.num_generated])
            limits = (params.temperature, params.top_k, params.top_p, params.min_p)
            assert explained(one.token_id, scores[place], *limits, uniform), (
                f"draw {place} took {one.token_id}, not {other.token_id}: {params}, uniform {uniform}"
            )
        logprobs = logits[rows[place]].double().log_softmax(-1)
        assert one.logprob == pytest.approx(float(logprobs[one.token_id]), abs=LOGPROB)
        assert (one.logprobs is None) == (params.logprobs is None)
        if one.logprobs is None:
            continue
        top = logprobs.topk(params.logprobs)
        chosen = one.logprobs.chosen
        rank = int((logits[rows[place]] > logits[rows[place], one.token_id]).sum()) + 1
        assert (chosen.token_id, chosen.logprob, chosen.rank) == (one.token_id, one.logprob, rank)
        assert [entry.token_id for entry in one.logprobs.top] == top.indices.tolist()
        assert [entry.logprob for entry in one.logprobs.top] == pytest.approx(top.values.tolist(), abs=LOGPROB)
        assert [entry.rank for entry in one.logprobs.top] == list(range(1, params.logprobs + 1))
    return drawn


def test_every_parameter_draws_what_the_sampler_draws(fresh: torch.Generator) -> None:
    vocab = 5000
    some = torch.randint(vocab, (30,), generator=fresh).tolist()
    sequences = [
        make_sequence(temperature=0.0),
        make_sequence(some[:3], some[5:9], logprobs=0),
        make_sequence(some, some[:5], temperature=0.6, repetition_penalty=1.8),
        make_sequence(some, some[5:20] * 3, presence_penalty=1.5),
        make_sequence(some, some[5:20] * 3, frequency_penalty=-0.7, logprobs=5),
        make_sequence(logit_bias={some[0]: 5.0, some[1]: -100.0, some[2]: -float("inf")}),
        make_sequence(answer=some[:4], min_tokens=5, stop_token_ids=[some[3]], logit_bias={EOS: 100.0}),
        make_sequence(temperature=1.5, top_k=10, seed=-1, logprobs=20),
        make_sequence(top_p=0.8, answer=some[:2]),
        make_sequence(min_p=0.05, n=3),
        make_sequence(some, some[:7] * 2, top_k=30, top_p=0.9, min_p=0.02, temperature=0.9, repetition_penalty=0.7,
                      presence_penalty=-0.5, frequency_penalty=0.3, logit_bias={some[0]: 1.0, EOS: 2.0}, min_tokens=15),
        make_sequence(some, some[:3], temperature=0.0, repetition_penalty=50.0, logprobs=1),
    ]  # fmt: skip
    logits = random_logits(4, vocab, fresh)
    rows = torch.randint(4, (len(sequences),), generator=fresh).tolist()
    assert_drawn_like_the_sampler(logits, rows, sequences)


def test_candidates_of_one_seed_draw_differently_from_one_row(fresh: torch.Generator) -> None:
    request = Request("r", [1], SamplingParams(n=8), secrets.randbits(64), 100, frozenset({EOS}))
    drawn = assert_drawn_like_the_sampler(torch.zeros(1, 3000), [0] * 8, request.sequences)
    assert len({one.token_id for one in drawn}) > 4


def test_a_draw_does_not_depend_on_what_else_is_drawn(fresh: torch.Generator) -> None:
    logits = random_logits(2, 70, fresh)
    sequences = [make_sequence(answer=[4] * i, seed=9, top_p=0.9, presence_penalty=0.1 * i) for i in range(2)]
    together = draw_on_device(logits, [1, 0], sequences)
    assert [draw_on_device(logits, [row], [s])[0] for row, s in zip([1, 0], sequences, strict=True)] == together


def test_no_end_before_min_tokens() -> None:
    logits = torch.zeros(1, 10)
    logits[0, EOS] = 50.0
    early, due = make_sequence(answer=[1], min_tokens=2), make_sequence(answer=[1, 1], min_tokens=2)
    drawn = draw_on_device(logits, [0, 0], [early, due])
    assert drawn[0].token_id != EOS
    assert drawn[1].token_id == EOS


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_an_infinite_bias_takes_the_token(fresh: torch.Generator) -> None:
    logits = random_logits(1, 100, fresh)
    sequences = [make_sequence(logit_bias={77: float("inf")}, **params) for params in ({}, {"temperature": 0.0})]
    assert [one.token_id for one in draw_on_device(logits, [0, 0], sequences)] == [77, 77]


def test_parameters_move_in_one_copy_each_at_a_multiple_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingRows] = []

    def record(logits: Tensor, rows: SamplingRows, out: Tensor) -> None:
        seen.append(rows)
        out.zero_()

    monkeypatch.setattr(device_sampler, "sample_rows", record)
    draw_on_device(torch.zeros(1, 9), [0] * 5, [make_sequence(logit_bias={3: 1.0, i: 2.0}) for i in range(5)])
    [rows] = seen
    assert rows.adjustments is not None
    tensors = [getattr(part, name) for part in (rows, rows.adjustments) for name in part.__dataclass_fields__]
    tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    assert len(tensors) == 17
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert {tensor.data_ptr() % 16 for tensor in tensors} == {0}
    assert rows.adjustments.token.tolist() == [0, 3, 1, 3, 2, 3, 3, 3, 4]


def test_no_sequences_give_no_samples_and_a_row_that_logits_lack_raises() -> None:
    assert draw_on_device(torch.zeros(2, 9), [], []) == []
    with pytest.raises(ValueError, match="rows"):
        draw_on_device(torch.zeros(2, 9), [2], [make_sequence()])
    with pytest.raises(ValueError, match="rows"):
        draw_on_device(torch.zeros(2, 9), [0, 1], [make_sequence()])
