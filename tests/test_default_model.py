"""The default model: greedy output equals transformers' on real prompts, alone, with candidates, and in one batch."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from localpaged import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from golden_answers import ANSWERS, NUM_PROMPTS, NUM_TOKENS, questions, reference_model, scores, sha256  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> LLM:
    return LLM(kv_cache_memory=1 << 29)


@pytest.fixture(scope="module")
def reference(default_model_path: Path) -> Any:
    return reference_model(default_model_path)


@pytest.fixture(scope="module")
def golden() -> Any:
    """What transformers answers, as scripts/golden_answers.py has recorded it."""
    return json.loads(ANSWERS.read_text())


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[dict[str, list[int]]]:
    tokenizer = llm._engine.tokenizer
    asked = [[{"role": "user", "content": question["turns"][0]}] for question in questions()]
    return [{"prompt_token_ids": tokenizer.encode(tokenizer.render_chat(messages))} for messages in asked]


def check(recorded: Any, prompt: list[int], answer: list[int]) -> None:
    """The answer is transformers' to its end, or up to a token that is as likely as transformers'."""
    assert prompt == recorded["prompt_token_ids"]
    expected = recorded["token_ids"]
    if answer != expected:
        pairs = zip(answer, expected, strict=False)
        position = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        assert position is not None, f"{len(answer)} tokens instead of {len(expected)}"
        ties = [tie[:2] for tie in recorded["ties"]]
        assert [position, answer[position]] in ties, f"parts ways at token {position} of {answer}"


def test_the_recorded_answers_are_of_this_model_and_what_transformers_finds_likeliest(
    default_model_path: Path, reference: Any, golden: Any
) -> None:
    assert golden["sha256"] == sha256(default_model_path), "run scripts/golden_answers.py"
    recorded = golden["prompts"][1]
    prompt, answer = recorded["prompt_token_ids"], recorded["token_ids"]
    assert len(answer) == NUM_TOKENS
    # Each is the likeliest after those before it, so this is the greedy answer.
    assert scores(reference, prompt, answer).argmax(-1).tolist() == answer


def test_logprobs_of_the_likeliest_tokens_are_within_a_hundredth_of_the_float32_model(
    llm: LLM, reference: Any, prompts: Any
) -> None:
    out = llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=32, logprobs=20))[0]
    with torch.inference_mode():
        sequence = torch.tensor([out.prompt_token_ids + out.outputs[0].token_ids])
        logprobs = reference(sequence).logits[0, len(out.prompt_token_ids) - 1 : -1].log_softmax(-1)
    for position, report in enumerate(out.outputs[0].logprobs or []):
        for entry in report.top:
            assert entry.logprob == pytest.approx(float(logprobs[position, entry.token_id]), abs=1e-2)


def test_greedy_alone_equals_transformers(llm: LLM, golden: Any, prompts: Any) -> None:
    for prompt, recorded in zip(prompts, golden["prompts"], strict=True):
        out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))[0]
        check(recorded, out.prompt_token_ids, out.outputs[0].token_ids)


def test_greedy_with_four_candidates_equals_transformers(llm: LLM, golden: Any, prompts: Any) -> None:
    # A short prompt, one whose answer ends by itself, and a long one.
    for place in (0, 3, 7):
        out = llm.generate(prompts[place], SamplingParams(temperature=0, n=4, max_tokens=NUM_TOKENS))[0]
        assert len(out.outputs) == 4
        for candidate in out.outputs:
            check(golden["prompts"][place], out.prompt_token_ids, candidate.token_ids)


def test_greedy_of_ten_prompts_in_one_batch_equals_transformers(llm: LLM, golden: Any, prompts: Any) -> None:
    outputs = llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    assert len(outputs) == NUM_PROMPTS
    for out, recorded in zip(outputs, golden["prompts"], strict=True):
        check(recorded, out.prompt_token_ids, out.outputs[0].token_ids)
