"""The engine end to end on a tiny real model: sampling of many candidates, sharing, preemption, cancellation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_model import BLOCK_SIZE, BYTES_PER_BLOCK, greedy, prompt

from localpaged import LLM, SamplingParams
from localpaged.engine.llm import RequestOutput
from localpaged.engine.messages import Delta, Event, Failed, Finished, Generate, Prefilled
from localpaged.errors import InvalidRequestError, PromptTooLongError


@pytest.fixture(scope="module")
def folder(byte_model: Path) -> Path:
    return byte_model


@pytest.fixture(scope="module")
def reference(byte_reference: Any) -> Any:
    return byte_reference


def make_llm(folder: Path, num_blocks: int = 64, **settings: Any) -> LLM:
    settings = {"block_size": BLOCK_SIZE, "dtype": "float32", "max_num_seqs": 16} | settings
    return LLM(str(folder), kv_cache_memory=num_blocks * BYTES_PER_BLOCK, **settings)


@pytest.fixture(scope="module")
def shared_llm(folder: Path) -> LLM:
    return make_llm(folder)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The engine, its pool audited after the test."""
    shared_llm._engine.core.pool.forget_cached()
    yield shared_llm
    shared_llm._engine.core.check()
    stats = shared_llm.kv_stats()
    assert (stats["referenced"], stats["consistent"]) == (0, True)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[candidate.token_ids for candidate in output.outputs] for output in outputs]


def test_greedy_answers_of_a_mixed_batch_equal_transformers(llm: LLM, reference: Any) -> None:
    prompts = [prompt(length, length) for length in (1, 7, 8, 9, 40, 63)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    for output in outputs:
        assert output.outputs[0].token_ids == greedy(reference, output.prompt_token_ids, 20)


def test_what_goes_on_from_a_text_keeps_the_space_before_its_first_word(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As SentencePiece decodes: a space at the very beginning is dropped.
    words = lambda token_ids: "".join(f" {token_id}" for token_id in token_ids).removeprefix(" ")  # noqa: E731
    monkeypatch.setattr(llm._engine.core, "decode", words)
    params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    assert llm.generate("Once upon", params)[0].outputs[0].text.startswith(" ")
    assert not llm.generate(prompt(9), params)[0].outputs[0].text.startswith(" ")


def test_candidates_differ_and_one_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=5, max_tokens=12, ignore_eos=True)
    first, again = llm.generate(prompt(19), params), llm.generate(prompt(19), params)
    assert len({tuple(candidate) for candidate in tokens(first)[0]}) == 4
    assert tokens(first) == tokens(again)


def test_without_a_seed_two_calls_differ(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=12, ignore_eos=True)
    assert tokens(llm.generate(prompt(19), params)) != tokens(llm.generate(prompt(19), params))


def test_a_seeded_answer_depends_neither_on_neighbours_nor_on_preemption(llm: LLM, folder: Path) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=30, ignore_eos=True)
    prompts = [prompt(13, salt) for salt in range(4)]
    alone = [tokens(llm.generate(one, params))[0] for one in prompts]
    together = tokens(llm.generate(prompts, params))
    crowded = make_llm(folder, num_blocks=24, max_num_batched_tokens=16)
    preempted = tokens(crowded.generate(prompts, params))
    assert crowded.kv_stats()["preemptions"] > 0
    assert alone == together == preempted


def test_candidates_share_the_prompt_and_copy_only_its_last_block(llm: LLM) -> None:
    core = llm._engine.core
    most = {"referenced": 0, "saved": 0}

    def watch(_: Event) -> None:
        most["referenced"] = max(most["referenced"], core.pool.num_referenced)
        most["saved"] = max(most["saved"], core.pool.num_saved)

    llm.generate(prompt(44), SamplingParams(n=4, max_tokens=4, ignore_eos=True, seed=1), on_event=watch)
    # Five full blocks once, and a sixth, partly filled, for each.
    assert most["referenced"] == 5 + 4
    assert most["saved"] >= 5 * 3


def test_a_second_turn_reuses_the_first(llm: LLM) -> None:
    first = llm.generate(prompt(30), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0]
    history = first.prompt_token_ids + first.outputs[0].token_ids + [5, 6, 7]
    second = llm.generate({"prompt_token_ids": history}, SamplingParams(max_tokens=2))[0]
    # Of 49 tokens that were computed (the last drawn one never is), the full blocks.
    assert second.num_cached_tokens == 48


def test_a_prompt_that_is_cached_whole_still_has_logits(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    first, again = llm.generate(prompt(32), params), llm.generate(prompt(32), params)
    assert again[0].num_cached_tokens == 24
    assert tokens(first) == tokens(again)


def test_best_of_returns_the_likeliest_candidates_in_order(llm: LLM) -> None:
    every = llm.generate(prompt(9), SamplingParams(n=6, seed=2, max_tokens=8, ignore_eos=True))[0]
    best = llm.generate(prompt(9), SamplingParams(n=2, best_of=6, seed=2, max_tokens=8, ignore_eos=True))[0]
    ranked = sorted(every.outputs, key=lambda candidate: -candidate.cumulative_logprob)
    assert [candidate.token_ids for candidate in best.outputs] == [candidate.token_ids for candidate in ranked[:2]]
    assert best.outputs[0].text == ranked[0].text


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_beam_search_equals_transformers(llm: LLM, reference: Any, width: int, length_penalty: float) -> None:
    for salt in range(4):
        token_ids = prompt(11, salt)["prompt_token_ids"]
        expected = reference.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, 11),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=14,
            do_sample=False,
            length_penalty=length_penalty,
            pad_token_id=0,
        )[:, 11:].tolist()
        params = SamplingParams(beam_width=width, n=width, max_tokens=14, length_penalty=length_penalty)
        found = tokens(llm.generate({"prompt_token_ids": token_ids}, params))[0]
        padded = [ids + [0] * (len(expected[0]) - len(ids)) for ids in found]
        assert padded == expected


def test_beams_share_more_than_their_prompt(llm: LLM) -> None:
    core = llm._engine.core
    saved = []
    params = SamplingParams(beam_width=4, n=1, max_tokens=40, ignore_eos=True)
    llm.generate(prompt(8), params, on_event=lambda _: None)
    core.pool.forget_cached()
    core.submit(Generate(request_id="beams", prompt_token_ids=prompt(8)["prompt_token_ids"], params=params))
    while core.has_work:
        core.step()
        core.check()
        saved.append(core.pool.num_saved)
    # Three of four beams save the prompt's one block; anything above is text that beams have in common.
    assert max(saved) > 3


def test_logprobs_equal_those_of_transformers(llm: LLM, reference: Any) -> None:
    out = llm.generate(prompt(12), SamplingParams(temperature=0, max_tokens=6, logprobs=3))[0]
    candidate = out.outputs[0]
    assert candidate.logprobs is not None
    with torch.inference_mode():
        logits = reference(torch.tensor([out.prompt_token_ids + candidate.token_ids])).logits[0]
    expected = logits.log_softmax(-1)[11:-1]
    for position, report in enumerate(candidate.logprobs):
        assert report.chosen.logprob == pytest.approx(float(expected[position].max()), abs=1e-4)
        assert [entry.token_id for entry in report.top] == expected[position].topk(3).indices.tolist()
    total = sum(report.chosen.logprob for report in candidate.logprobs)
    assert candidate.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_prompt_logprobs_are_right_with_the_prompt_in_the_cache(llm: LLM, reference: Any) -> None:
    llm.generate(prompt(30), SamplingParams(max_tokens=1))
    out = llm.generate(prompt(30), SamplingParams(max_tokens=1, prompt_logprobs=2))[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([out.prompt_token_ids])).logits[0].log_softmax(-1)
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == 30
    for position, report in enumerate(out.prompt_logprobs[1:]):
        assert report is not None
        token_id = out.prompt_token_ids[position + 1]
        assert report.chosen.token_id == token_id
        assert report.chosen.logprob == pytest.approx(float(expected[position, token_id]), abs=1e-4)


def test_a_stop_string_ends_the_answer_before_it(llm: LLM) -> None:
    whole = llm.generate("abcdefg", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0]
    stop = whole.text[5:8]
    cut = llm.generate("abcdefg", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=[stop]))[0]
    assert cut.outputs[0].text == whole.text[: whole.text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_a_stop_token_ends_the_answer(llm: LLM) -> None:
    whole = llm.generate(prompt(5), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))[0].outputs[0]
    stop = whole.token_ids[3]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop_token_ids=[stop])
    cut = llm.generate(prompt(5), params)[0].outputs[0]
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert cut.stop_reason == stop


def test_an_answer_ends_at_max_tokens(llm: LLM) -> None:
    out = llm.generate(prompt(5), SamplingParams(max_tokens=7, ignore_eos=True))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (7, "length")


def run_until(llm: LLM, count: int) -> list[Event]:
    events: list[Event] = []
    for _ in range(count):
        events += llm._engine.core.step()
    return events


def submit(llm: LLM, request_id: str, length: int, **params: Any) -> None:
    settings = SamplingParams(max_tokens=50, ignore_eos=True, **params)
    refused = llm._engine.core.submit(
        Generate(request_id=request_id, prompt_token_ids=prompt(length)["prompt_token_ids"], params=settings)
    )
    assert not refused


def converse(llm: LLM, name: str, token_ids: list[int], n: int = 1) -> tuple[list[list[int]], int]:
    """One greedy turn of conversation "c" that keeps its answers; the answers, and how much was not computed."""
    core = llm._engine.core
    params = SamplingParams(n=n, temperature=0, max_tokens=13, ignore_eos=True)
    names = [f"{name}{index}" for index in range(n)]
    command = Generate(request_id=name, prompt_token_ids=token_ids, params=params, conversation="c", lease_ids=names)
    assert not core.submit(command)
    answers: list[list[int]] = [[] for _ in range(n)]
    while True:
        for event in core.step():
            if isinstance(event, Delta):
                answers[event.index] += event.token_ids
            if isinstance(event, Finished):
                core.check()
                return answers, event.num_cached_tokens


def test_turns_from_leases_answer_as_computed_ones(llm: LLM, reference: Any) -> None:
    history = prompt(21)["prompt_token_ids"]
    first, cached = converse(llm, "first", history, n=4)
    assert cached == 0
    history += first[2]
    turns = []
    for turn in range(3):
        question = [11 + turn, 12, 13]
        (answer,), cached = converse(llm, f"turn{turn}", history + question)
        assert cached == len(history) - 1  # all but the last token drawn
        assert answer == greedy(reference, history + question, 13)
        turns.append(history + question)
        history = history + question + answer
    # Back to an earlier place, in the middle of a block, and on from there.
    edited = [*turns[1][:-2], 99, 98]
    (answer,), cached = converse(llm, "edited", edited)
    assert cached == len(edited) - 2
    assert answer == greedy(reference, edited, 13)
    (answer,), cached = converse(llm, "again", turns[2])
    assert cached == len(turns[2]) - 1
    assert answer == greedy(reference, turns[2], 13)
    llm._engine.core.leases.drop_conversation("c")


def test_cancelling_one_candidate_leaves_the_others_running(llm: LLM) -> None:
    core = llm._engine.core
    submit(llm, "r", 20, n=3)
    run_until(llm, 4)
    (event,) = core.cancel("r", 1)
    assert isinstance(event, Delta)
    assert (event.index, event.finish_reason) == (1, "cancelled")
    core.check()
    events = run_until(llm, 3)
    assert {event.index for event in events if isinstance(event, Delta)} == {0, 2}
    core.cancel("r")


def test_cancelling_ends_all_candidates_and_returns_every_block(llm: LLM) -> None:
    core = llm._engine.core
    submit(llm, "r", 20, n=3)
    run_until(llm, 4)
    events = core.cancel("r")
    assert [type(event) for event in events] == [Delta, Delta, Delta, Finished]
    assert core.pool.num_referenced == 0
    assert not core.has_work
    assert core.cancel("r") == []


def test_cancelling_one_request_does_not_stop_another(llm: LLM) -> None:
    core = llm._engine.core
    submit(llm, "a", 20)
    submit(llm, "b", 20)
    run_until(llm, 2)
    core.cancel("a")
    assert {event.request_id for event in run_until(llm, 2)} == {"b"}
    core.cancel("b")


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm._engine.core
    submit(llm, "r", 20, n=2)
    run_until(llm, 2)
    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("poisoned")))
        (event,) = core.step()
    assert isinstance(event, Failed)
    assert "poisoned" in event.message
    assert core.pool.num_referenced == 0
    assert len(llm.generate(prompt(5), SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def test_bad_requests_are_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match="600 tokens and the model's window is 512"):
        llm.generate(prompt(600))
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate({"prompt_token_ids": []})
    with pytest.raises(InvalidRequestError, match="token id 320; the model's are 0 to 319"):
        llm.generate({"prompt_token_ids": [320]})
    with pytest.raises(InvalidRequestError, match="stop strings"):
        llm.generate("a", SamplingParams(beam_width=2, stop=["x"]))
    with pytest.raises(PromptTooLongError, match="17 candidates"):
        llm.generate("a", SamplingParams(n=17))
    with pytest.raises(InvalidRequestError, match="no setting wrong"):
        LLM("x", wrong=1)


def test_answers_come_in_the_order_of_their_prompts(llm: LLM) -> None:
    prompts = [prompt(length) for length in (30, 3, 11)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=2))
    assert [output.prompt_token_ids for output in outputs] == [one["prompt_token_ids"] for one in prompts]


def test_more_requests_than_run_at_once_all_finish(llm: LLM) -> None:
    outputs = llm.generate([prompt(12, salt) for salt in range(30)], SamplingParams(n=2, max_tokens=5, ignore_eos=True))
    assert all(len(candidate.token_ids) == 5 for output in outputs for candidate in output.outputs)


def test_an_embedding_is_the_mean_of_transformers_hidden_states_whatever_runs_beside_it(
    folder: Path, reference: Any
) -> None:
    # Chunks of 16 tokens; what was computed before is not skipped.
    llm = make_llm(folder, max_num_batched_tokens=16)
    prompts: Any = [prompt(40), prompt(7, 1), prompt(40)]
    llm.generate(prompts, SamplingParams(max_tokens=1))
    llm._engine.core.submit(Generate(request_id="other", params=SamplingParams(n=3, max_tokens=20), **prompt(9, 2)))
    llm._engine.core.step()
    events: list[Event] = []
    for index, one in enumerate(prompts):
        llm._engine.core.submit(
            Generate(request_id=str(index), params=SamplingParams(max_tokens=1), embeds=True, **one)
        )
    while llm._engine.core.has_work:
        events += llm._engine.core.step()
    ends = {event.request_id: event for event in events if isinstance(event, Finished)}
    assert set(ends) == {"other", "0", "1", "2"}
    assert [ends[str(i)].num_generated_tokens for i in range(3)] == [0, 0, 0]
    embedded = [event for event in events if isinstance(event, Prefilled) and event.embedding is not None]
    assert len(embedded) == 3
    for event in embedded:
        ids = torch.tensor([prompts[int(event.request_id)]["prompt_token_ids"]])
        with torch.inference_mode():
            hidden = reference(ids, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(torch.tensor(event.embedding), hidden[0].mean(0), atol=1e-4, rtol=1e-4)
    vectors = llm.embed(prompts)
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-6) and sum(x * x for x in vectors[1]) == pytest.approx(1)
    llm._engine.core.check()
    assert llm.kv_stats()["referenced"] == 0
