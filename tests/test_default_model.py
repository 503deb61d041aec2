"""The default model: greedy output equals transformers' on real prompts, alone, with candidates, and in one batch."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from localpaged import LLM, SamplingParams
from localpaged.models.gguf_header import read_header, transformers_config
from localpaged.models.gguf_weights import GgufWeights

NUM_PROMPTS = 10
NUM_TOKENS = 64
# Two tokens whose scores differ by less than the engine's own error may come in either order.
TIE = 1e-2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> LLM:
    return LLM(kv_cache_memory=1 << 29)


@pytest.fixture(scope="module")
def reference(default_model_path: Path) -> Any:
    """transformers' own Llama in float32 with the weights of the file, dequantised by the gguf package."""
    from transformers import LlamaForCausalLM

    header = read_header(default_model_path)
    config = transformers_config(header)
    weights = GgufWeights(default_model_path, header, config)
    model = LlamaForCausalLM(config)
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    model.load_state_dict({name: weights.tensor(name) for name in names}, strict=False)
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[dict[str, list[int]]]:
    lines = (Path(__file__).parent / "data" / "mt_bench_questions.jsonl").read_text().splitlines()
    tokenizer = llm._engine.tokenizer
    questions = [json.loads(line)["turns"][0] for line in lines[:: len(lines) // NUM_PROMPTS][:NUM_PROMPTS]]
    return [
        {"prompt_token_ids": tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]))}
        for question in questions
    ]


@cache
def first_difference(reference: Any, prompt: tuple[int, ...], answer: tuple[int, ...]) -> tuple[int, float] | None:
    """Where the answer leaves transformers' greedy path, and by how much its token is behind the likeliest."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    for position, token_id in enumerate(answer):
        if int(logits[position].argmax()) != token_id:
            return position, float(logits[position].max() - logits[position, token_id])
    return None


def check(reference: Any, prompt: list[int], answer: list[int]) -> None:
    difference = first_difference(reference, tuple(prompt), tuple(answer))
    if difference is not None:
        position, behind = difference
        print(f"parts ways at token {position}: {behind:.2e} behind the likeliest")
        assert behind < TIE


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


def test_greedy_alone_equals_transformers(llm: LLM, reference: Any, prompts: Any) -> None:
    for prompt in prompts:
        out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))[0]
        check(reference, out.prompt_token_ids, out.outputs[0].token_ids)


def test_greedy_with_four_candidates_equals_transformers(llm: LLM, reference: Any, prompts: Any) -> None:
    for prompt in prompts:
        out = llm.generate(prompt, SamplingParams(temperature=0, n=4, max_tokens=NUM_TOKENS))[0]
        for candidate in {tuple(candidate.token_ids) for candidate in out.outputs}:
            check(reference, out.prompt_token_ids, list(candidate))


def test_greedy_of_ten_prompts_in_one_batch_equals_transformers(llm: LLM, reference: Any, prompts: Any) -> None:
    outputs = llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    assert len(outputs) == NUM_PROMPTS
    for out in outputs:
        check(reference, out.prompt_token_ids, out.outputs[0].token_ids)
