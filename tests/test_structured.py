"""Answers that must follow a schema, an expression or a grammar, from a model that knows none of them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import interpreter  # noqa: F401
import numpy as np
import pytest
import torch
from byte_model import BLOCK_SIZE, prompt

from localpaged import LLM, SamplingParams, StructuredOutputs
from localpaged.engine.device_sampler import DeviceSampler
from localpaged.engine.sampler import HostSampler
from localpaged.engine.sequence import Request
from localpaged.errors import InvalidRequestError
from localpaged.kernels import dispatch

BYTES_PER_BLOCK = 2 * 3 * 2 * 16 * 4 * BLOCK_SIZE
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "good": {"type": "boolean"},
    },
    "required": ["colour", "count", "good"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(byte_model: Path) -> LLM:
    return LLM(str(byte_model), kv_cache_memory=512 * BYTES_PER_BLOCK, block_size=BLOCK_SIZE, dtype="float32")


def answers(llm: LLM, n: int = 4, temperature: float = 1.0, **wanted: Any) -> list[tuple[str, str | None]]:
    params = SamplingParams(
        n=n, seed=2, temperature=temperature, max_tokens=250, structured_outputs=StructuredOutputs(**wanted)
    )
    outputs = llm.generate([prompt(9)], params)[0].outputs
    stats = llm.kv_stats()
    assert (stats["referenced"], stats["consistent"]) == (0, True)
    return [(output.text, output.finish_reason) for output in outputs]


def test_every_candidate_follows_the_schema_and_they_differ(llm: LLM) -> None:
    texts = answers(llm, n=6, json=SCHEMA)
    for text, reason in texts:
        assert reason == "stop"
        value = json.loads(text)
        assert set(value) == {"colour", "count", "good"}
        assert value["colour"] in ("red", "green", "blue")
        assert 0 <= value["count"] <= 99
        assert isinstance(value["good"], bool)
    assert len({text for text, _ in texts}) > 1


def test_a_greedy_answer_follows_it_too(llm: LLM) -> None:
    ((text, reason),) = answers(llm, n=1, temperature=0, json=SCHEMA)
    assert reason == "stop" and json.loads(text)["colour"] in ("red", "green", "blue")


def test_an_expression_a_choice_and_a_grammar(llm: LLM) -> None:
    for text, reason in answers(llm, regex=r"\d{3}-[A-F]{4}"):
        assert re.fullmatch(r"\d{3}-[A-F]{4}", text) and reason == "stop"
    assert {text for text, _ in answers(llm, n=8, choice=["yes", 'a "no"'])} <= {"yes", 'a "no"'}
    for text, _ in answers(llm, grammar='start: "(" start ")" | "x"'):
        assert re.fullmatch(r"\(*x\)*", text) and text.count("(") == text.count(")")


def test_any_json_object_begins_and_ends_as_one(llm: LLM) -> None:
    for text, reason in answers(llm, json_object=True):
        assert text.startswith("{")
        if reason == "stop":
            assert isinstance(json.loads(text), dict)


def test_one_that_is_free_in_the_same_batch_is_not_bound(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, seed=4, ignore_eos=True)
    alone = llm.generate([prompt(9)], params)[0].outputs[0].token_ids
    core = llm._engine.core
    bound = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputs(regex="[ab]{30}"))
    from localpaged.engine.messages import Delta, Generate

    for name, given in (("free", params), ("bound", bound)):
        command = Generate(request_id=name, prompt_token_ids=prompt(9)["prompt_token_ids"], params=given)
        assert not core.submit(command)
    told: dict[str, list[int]] = {"free": [], "bound": []}
    text = ""
    while core.has_work:
        for event in core.step():
            if isinstance(event, Delta):
                told[event.request_id] += event.token_ids
                text += event.text if event.request_id == "bound" else ""
    assert told["free"] == alone
    assert re.fullmatch("[ab]{30}", text)


def test_reported_probabilities_are_the_model_s_own(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, logprobs=3, structured_outputs=StructuredOutputs(regex="z"))
    (output,) = llm.generate([prompt(9)], params)[0].outputs
    free = llm.generate([prompt(9)], SamplingParams(max_tokens=1, logprobs=3, temperature=0))[0].outputs[0]
    assert output.logprobs is not None and free.logprobs is not None
    assert output.logprobs[0].top == free.logprobs[0].top


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"json": {"type": "nope"}}, "nope"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start: missing"}, "missing"),
        ({}, "not none"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"choice": []}, "no choice"),
    ],
)
def test_what_cannot_be_followed_is_refused(llm: LLM, wanted: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        answers(llm, **wanted)
    assert not llm._engine.core.has_work


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 3}, {"beam_width": 2}])
def test_what_contradicts_an_end_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="does not go with structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **other)


def test_a_guide_that_fails_ends_its_candidate_and_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from localpaged.engine.guide import Guide

    plain, taken = Guide.take, []

    def take(self: Guide, token_id: int) -> None:
        taken.append(token_id)
        if len(taken) == 4:
            raise InvalidRequestError("What the answer must follow is too much: broken. Make it simpler.")
        plain(self, token_id)

    monkeypatch.setattr(Guide, "take", take)
    reasons = [reason for _, reason in answers(llm, n=3, regex="[ab]{9}")]
    assert sorted(map(str, reasons)) == ["error", "stop", "stop"]


def test_the_gpu_s_sampler_is_bound_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_on_cpu", True)
    sequences = []
    for index in range(3):
        request = Request(
            str(index), [1, 2], SamplingParams(seed=index, temperature=float(index), logprobs=1), index, 9
        )
        sequences.append(request.sequences[0])
    # The second and third are bound; the first two draw from one row.
    for sequence, places in zip(sequences[1:], ([4], [7, 30]), strict=True):
        allowed = np.zeros(50, dtype=np.bool_)
        allowed[places] = True
        sequence.guide = SimpleNamespace(allowed=allowed)  # type: ignore[assignment]
    logits = torch.randn(2, 50)
    before = logits.clone()
    drawn = DeviceSampler(torch.device("cpu")).launch(logits, [0, 0, 1], sequences).result()
    expected = HostSampler().launch(logits, [0, 0, 1], sequences).result()
    assert [one.token_id for one in drawn] == [one.token_id for one in expected]
    assert drawn[1].token_id == 4 and drawn[2].token_id in (7, 30)
    for one, other in zip(drawn, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert one.logprobs is not None and other.logprobs is not None
        assert one.logprobs.top[0].token_id == other.logprobs.top[0].token_id
    assert torch.equal(logits, before)
