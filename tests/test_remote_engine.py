"""Another server in the engine's place: what it is asked, what its answers become, and every way in which it fails."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai_stub import DONE, Stub, end, refusal, stub_serving, usage, word
from starlette.responses import JSONResponse, RedirectResponse

from localpaged.engine.messages import Admitted, Delta, Event, Failed, Finished
from localpaged.engine.prompt import ChatPrompt, Prompt
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.structured_outputs import StructuredOutputs
from localpaged.server.remote_body import seed_of
from localpaged.server.remote_config import RemoteConfig
from localpaged.server.remote_engine import RemoteEngine

HELLO = ChatPrompt([{"role": "user", "content": "Hello"}])
ONE = SamplingParams(max_tokens=32)
THREE = SamplingParams(n=3, max_tokens=32, seed=5)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stub_serving() as stub:
        yield stub


@asynccontextmanager
async def engine_on(address: str, **options: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(RemoteConfig(address, **options), away_every_s=0.05)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def ask(
    stub: Stub, prompt: Prompt = HELLO, params: SamplingParams = ONE, times: int = 1, **options: Any
) -> list[Event]:
    """All events of a request to a fresh engine; of the last of several."""

    async def run() -> list[Event]:
        async with engine_on(stub.address, **options) as engine:
            for _ in range(times):
                events = [event async for event in engine.generate(prompt, params)]
            return events

    return asyncio.run(run())


def texts(events: list[Event], n: int = 1) -> list[str]:
    deltas = [event for event in events if isinstance(event, Delta)]
    return ["".join(delta.text for delta in deltas if delta.index == index) for index in range(n)]


def ends(events: list[Event]) -> dict[int, str]:
    return {event.index: event.finish_reason for event in events if isinstance(event, Delta) and event.finish_reason}


def failure(events: list[Event]) -> Failed:
    assert isinstance(events[-1], Failed)
    return events[-1]


def test_an_answer_comes_with_its_text_end_and_counts(stub: Stub) -> None:
    events = ask(stub)
    assert isinstance(events[0], Admitted) and events[0].num_prompt_tokens is None
    assert texts(events) == ["Hi there"] and ends(events) == {0: "stop"}
    last_delta, last = events[-2:]
    assert isinstance(last_delta, Delta) and last_delta.num_tokens == 2
    assert isinstance(last, Finished)
    assert (last.num_prompt_tokens, last.num_cached_tokens, last.num_generated_tokens) == (7, None, 2)
    (body,) = stub.requests
    assert body["model"] == "stub-1" and body["messages"] == HELLO.messages
    assert "n" not in body and "top_k" not in body and "seed" not in body


def test_what_the_server_does_not_count_is_not_known(stub: Stub) -> None:
    stub.answer = lambda body: [word("Hi"), end(), DONE]
    last = ask(stub)[-1]
    assert isinstance(last, Finished)
    assert last.num_prompt_tokens is last.num_cached_tokens is last.num_generated_tokens is None


def test_several_candidates_are_one_request_with_running_counts_and_cached_tokens(stub: Stub) -> None:
    def count(number: int) -> dict[str, int]:
        return {"prompt_tokens": 9, "completion_tokens": number}

    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    stub.answer = lambda body: [
        *(word("", index, usage=count(0)) for index in range(3)),
        *(word(f"a{index}", index, usage=count(2)) for index in range(3)),
        *(end("length", index, usage=count(5)) for index in range(3)),
        usage(9, 15, **details),
        DONE,
    ]
    events = ask(stub, params=THREE)
    assert texts(events, 3) == ["a0", "a1", "a2"] and ends(events) == dict.fromkeys(range(3), "length")
    counts = [event.num_tokens for event in events if isinstance(event, Delta) and event.finish_reason]
    assert counts == [5, 5, 5]
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.num_prompt_tokens, last.num_cached_tokens, last.num_generated_tokens) == (9, 4, 15)
    (body,) = stub.requests
    assert (body["n"], body["seed"]) == (3, 5)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("message", ["n must be 1", "Only one completion choice is allowed"])
def test_a_server_that_refuses_n_is_asked_for_each_candidate_with_its_own_seed_and_remembered(
    stub: Stub, message: str
) -> None:
    stub.answer = lambda body: (
        refusal(400, message) if body.get("n") else [word(f"s{body['seed']}"), end(), usage(7, 1), DONE]
    )
    events = ask(stub, params=THREE, times=2)
    seeds = [body["seed"] for body in stub.requests[1:4]]
    assert seeds == [seed_of(5, index) for index in range(3)] and len(set(seeds)) == 3 and seeds[0] == 5
    assert texts(events, 3) == [f"s{seed}" for seed in seeds]
    assert [body.get("n") for body in stub.requests] == [3, *[None] * 6]
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.num_prompt_tokens, last.num_generated_tokens) == (7, 3)


def test_a_server_that_ignores_n_is_asked_for_the_missing_candidates(stub: Stub) -> None:
    stub.answer = lambda body: [word(f"n{body.get('n')}"), end(), DONE]
    events = ask(stub, params=THREE, times=2)
    assert [body.get("n") for body in stub.requests] == [3, *[None] * 5]
    assert texts(events, 3) == ["nNone"] * 3


def test_greedy_candidates_that_are_refused_together_say_nothing_about_sampled_ones(stub: Stub) -> None:
    stub.answer = lambda body: refusal(400, "n must be 1 when greedy") if body.get("n") else [word("x"), end(), DONE]

    async def run() -> None:
        async with engine_on(stub.address) as engine:
            params = SamplingParams(n=2, temperature=0)
            assert texts([event async for event in engine.generate(HELLO, params)], 2) == ["x", "x"]
            assert engine.quirks.takes_n

    asyncio.run(run())


@pytest.mark.parametrize(
    ("named", "kept"),
    [("stream_options.continuous_usage_stats", {"include_usage": True}), ("stream_options", None)],
)
def test_a_server_that_does_not_know_how_to_count_is_asked_without(stub: Stub, named: str, kept: Any) -> None:
    leaf = named.rpartition(".")[2]

    def answer(body: Any) -> Any:
        if leaf in str(body):
            return JSONResponse({"detail": [{"loc": ["body", *named.split(".")], "msg": "Extra inputs"}]}, 422)
        return [word("x"), end(), DONE]

    stub.answer = answer
    assert texts(ask(stub, times=2)) == ["x"]
    assert [body.get("stream_options") for body in stub.requests[1:]] == [kept, kept]


def test_a_refusal_that_only_mentions_a_field_leaves_it_in_use(stub: Stub) -> None:
    stub.answer = lambda body: refusal(400, "bad top_k in {'top_k': 4, 'stream_options': {}}")
    params = SamplingParams(top_k=4)

    async def run() -> None:
        async with engine_on(stub.address) as engine:
            assert failure([event async for event in engine.generate(HELLO, params)]).param == "top_k"
            assert engine.quirks.takes_usage and engine.quirks.takes_running_usage

    asyncio.run(run())


def test_a_refusal_of_another_field_is_not_tried_again_for_each_candidate(stub: Stub) -> None:
    stub.answer = lambda body: refusal(400, "it is bad", param="min_p")
    assert failure(ask(stub, params=THREE)).param == "min_p"
    assert len(stub.requests) == 1


def test_a_server_that_wants_the_limit_under_its_new_name_gets_it(stub: Stub) -> None:
    message = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    stub.answer = lambda body: refusal(400, message) if "max_tokens" in body else [word("x"), end(), DONE]
    assert texts(ask(stub)) == ["x"]
    assert stub.requests[-1]["max_completion_tokens"] == 32


def test_parameters_beyond_openais_are_sent_where_they_ask_for_something(stub: Stub) -> None:
    params = SamplingParams(
        top_k=4, min_p=0.1, repetition_penalty=1.2, stop=["x"], logit_bias={3: 1.5}, max_tokens=None
    )
    ask(stub, params=params)
    (body,) = stub.requests
    assert {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2, "stop": ["x"]}.items() <= body.items()
    assert body["logit_bias"] == {"3": 1.5} and "max_tokens" not in body and "min_tokens" not in body


def test_structured_outputs_are_asked_for_in_openais_form_where_there_is_one(stub: Stub) -> None:
    schema = {"type": "object"}
    ask(stub, params=SamplingParams(structured_outputs=StructuredOutputs(json=schema)))
    ask(stub, params=SamplingParams(structured_outputs=StructuredOutputs(choice=["a", "b"])))
    assert stub.requests[0]["response_format"]["json_schema"]["schema"] == schema
    assert stub.requests[1]["structured_outputs"] == {"choice": ["a", "b"]}


def test_a_refused_parameter_is_named_in_the_servers_own_words(stub: Stub) -> None:
    stub.answer = lambda body: refusal(400, "Unrecognized request argument supplied: top_k")
    told = failure(ask(stub, params=SamplingParams(top_k=4)))
    assert (told.code, told.param) == ("invalid_request", "top_k")
    assert "Unrecognized request argument supplied: top_k" in told.message


def test_a_prompt_that_is_too_long_is_said_once_and_not_tried_again_for_each_candidate(stub: Stub) -> None:
    stub.answer = lambda body: refusal(400, "This model's maximum context length is 2048 tokens.")
    told = failure(ask(stub, params=THREE))
    assert told.code == "context_length_exceeded" and "2048 tokens" in told.message
    assert len(stub.requests) == 1


@pytest.mark.parametrize("name", ["best_of", "beam_width"])
def test_what_no_stream_can_carry_is_refused_here(stub: Stub, name: str) -> None:
    told = failure(ask(stub, params=SamplingParams(**{name: 4})))
    assert (told.code, told.param) == ("not_available", name) and stub.requests == []


def test_a_plain_prompt_goes_to_plain_completions_text_or_ids(stub: Stub) -> None:
    choice = {"index": 0, "text": "abc", "finish_reason": "length", "stop_reason": None}
    stub.answer = lambda body: [{"choices": [choice]}, DONE]
    assert texts(ask(stub, "Once upon")) == texts(ask(stub, [1, 2])) == ["abc"]
    assert stub.paths == ["/v1/completions"] * 2
    assert [body["prompt"] for body in stub.requests] == ["Once upon", [1, 2]]


def test_what_a_model_thinks_is_put_back_between_its_tags(stub: Stub) -> None:
    def thought(text: str) -> Any:
        return {"choices": [{"index": 0, "delta": {"reasoning_content": text}}]}

    stub.answer = lambda body: [thought("Hm"), thought("m."), word("Yes"), word("."), end(), DONE]
    assert texts(ask(stub)) == ["<think>\nHmm.\n</think>\n\nYes."]


def test_log_probabilities_keep_the_servers_tokens_and_ranks(stub: Stub) -> None:
    token = {"token": "a", "logprob": -0.5, "bytes": [97]}
    told = {"content": [token | {"top_logprobs": [{"token": "b", "logprob": -0.1, "bytes": [98]}, token]}]}
    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": told}]}
    stub.answer = lambda body: [chunk, end(), DONE]

    async def run() -> None:
        async with engine_on(stub.address) as engine:
            params = SamplingParams(logprobs=2)
            events = [event async for event in engine.generate(HELLO, params)]
            (position,) = next(event.logprobs for event in events if isinstance(event, Delta) and event.logprobs)
            assert engine.vocabulary.token_text(position.chosen.token_id) == "a"
            assert engine.vocabulary.token_bytes(position.top[0].token_id) == b"b"
            assert (position.chosen.rank, position.chosen.logprob) == (2, -0.5)

    asyncio.run(run())
    assert (stub.requests[0]["logprobs"], stub.requests[0]["top_logprobs"]) == (True, 2)


def test_line_separators_within_a_text_and_events_in_pieces_arrive_whole(stub: Stub) -> None:
    text = "a\u2028b\x85c\x0b"
    sent = f"data: {json.dumps(word(text), ensure_ascii=False)}\r\n\r\n".encode()
    pieces = [part for byte in sent for part in (bytes([byte]), 0.0)]
    stub.answer = lambda body: [b": a comment\n\n", *pieces, end(), DONE]
    assert texts(ask(stub)) == [text]


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "remote", "refuses the key (401). Check --remote-api-key-file."),
        (403, "remote", "refuses the key (403)"),
        (404, "remote", "Check --base-url and --model."),
        (429, "remote_busy", "too much to do (429: why)"),
        (500, "remote", "failed (500: why)"),
        (503, "remote", "failed (503: why)"),
    ],
)
def test_every_refusal_is_told_with_what_to_do(stub: Stub, status: int, code: str, words: str) -> None:
    stub.answer = lambda body: refusal(status, "why")
    told = failure(ask(stub, api_key="secret-key"))
    assert told.code == code and words in told.message and "secret-key" not in told.message


def test_redirects_are_not_followed(stub: Stub) -> None:
    stub.answer = lambda body: RedirectResponse(f"{stub.address}/completions")
    told = failure(ask(stub))
    assert "where we do not go" in told.message and stub.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([word("Hal"), DONE], "ended before its end"),
        ([word("Hal")], "ended before its end"),
        ([word("Hal"), ValueError("the server dies")], "broke off"),
        ([word("Hal"), "no JSON"], "no chunk of an answer"),
        ([word("Hal"), {"choices": [], "usage": 3}], "no chunk of an answer"),
        ([word("Hal"), {"choices": [3]}], "no chunk of an answer"),
        ([word("Hal"), {"error": {"message": "out of memory"}}], "failed while it answered: out of memory"),
        ([word("Hal"), end("content_filter"), DONE], "ended with 'content_filter'"),
        ([word("Hal"), 30.0], "silent for too long"),
    ],
)
def test_an_answer_that_breaks_off_keeps_what_came_and_says_why(stub: Stub, parts: Any, words: str) -> None:
    stub.answer = lambda body: parts
    events = ask(stub, timeout_s=0.5)
    assert texts(events) == ["Hal"] and ends(events) == {} and words in failure(events).message


def test_an_end_without_done_is_an_end(stub: Stub) -> None:
    stub.answer = lambda body: [word("Hi"), end()]
    assert ends(ask(stub)) == {0: "stop"}


def test_an_answer_that_is_no_stream_is_said(stub: Stub) -> None:
    stub.answer = lambda body: JSONResponse({"choices": []})
    assert "not with a stream" in failure(ask(stub)).message


def test_one_candidate_that_fails_lets_the_others_end_first(stub: Stub) -> None:
    stub.answer = lambda body: (
        refusal(400, "n")
        if body.get("n")
        else refusal(429, "enough")
        if body["seed"] == seed_of(5, 1)
        else [0.1, word("x"), end(), DONE]
    )
    events = ask(stub, params=THREE)
    assert texts(events, 3) == ["x", "", "x"] and ends(events) == {0: "stop", 2: "stop"}
    assert failure(events).code == "remote_busy"


@pytest.mark.parametrize("together", [True, False])
def test_stopping_one_candidate_keeps_the_others_and_stopping_all_closes_the_connections(
    stub: Stub, together: bool
) -> None:
    def answer(body: Any) -> Any:
        n = body.get("n", 1)
        if n > 1 and not together:
            return refusal(400, "n")
        return (part for _ in range(1000) for part in [*(word("x", index) for index in range(n)), 0.01])

    stub.answer = answer
    num_open: list[int] = []

    async def run() -> list[Event]:
        async with engine_on(stub.address) as engine:
            events = []
            async for event in engine.generate(HELLO, THREE, "r"):
                events.append(event)
                if len(texts(events, 3)[1]) == 2:
                    await engine.cancel("r", 1)
                if min(map(len, (texts(events, 3)[0], texts(events, 3)[2]))) == 20 and len(ends(events)) == 1:
                    num_open.append(stub.num_open)
                    await engine.cancel("r")
            for _ in range(100):
                if not stub.num_open:
                    break
                await asyncio.sleep(0.02)
            return events

    events = asyncio.run(run())
    assert ends(events) == dict.fromkeys(range(3), "cancelled")
    assert len(texts(events, 3)[1]) == 2 and isinstance(events[-1], Finished)
    assert num_open[0] == (1 if together else 2)
    assert stub.num_open == 0 and stub.num_left == (1 if together else 3)


def test_leaving_the_events_closes_the_connection(stub: Stub) -> None:
    stub.answer = lambda body: (part for _ in range(1000) for part in (word("x"), 0.01))

    async def run() -> None:
        async with engine_on(stub.address) as engine:
            events = engine.generate(HELLO, ONE)
            async for event in events:
                if isinstance(event, Delta):
                    break
            await events.aclose()  # type: ignore[attr-defined]
            for _ in range(100):
                if not stub.num_open:
                    return
                await asyncio.sleep(0.02)
            raise AssertionError("the stream is still open")

    asyncio.run(run())
