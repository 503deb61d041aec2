"""The Anthropic-compatible API as programs use it: the official client and plain HTTP, on a scripted engine."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic, APIStatusError, AuthenticationError, BadRequestError, NotFoundError
from api_server import ANSWER, MODEL, ApiEngine, serving, serving_default_model, wait_for_empty_pool, wait_until

TURNS: Any = [{"role": "user", "content": "Name a boat."}]
PROMPT = "<|im_start|>user\nName a boat.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def engine() -> ApiEngine:
    return ApiEngine()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, engine: ApiEngine) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("anthropic"), engine, ["mine"]) as address:
        yield address


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        yield client


def ask(server: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server}/v1/messages", json={"model": MODEL, "max_tokens": 64, "messages": TURNS} | fields)


def count(server: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server}/v1/messages/count_tokens", json={"model": MODEL, "messages": TURNS} | fields)


def events_of(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """The stream's events: (name, data)."""
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def last_prompt(engine: ApiEngine) -> str:
    return engine.tokenizer.decode(engine.prompts[-1])


def test_a_message_has_blocks_a_stop_reason_and_usage(server: str, engine: ApiEngine) -> None:
    unheard = "Name a boat that nobody has named before."
    answer = ask(server, messages=[{"role": "user", "content": unheard}]).json()
    assert answer.pop("id").startswith("msg_")
    usage = answer.pop("usage")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert last_prompt(engine) == PROMPT.replace("Name a boat.", unheard)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(engine.prompts[-1])
    assert (usage["output_tokens"], usage["cache_creation_input_tokens"]) == (len(ANSWER), 0)


def test_input_tokens_leave_out_what_was_found_in_the_cache(server: str) -> None:
    for stream in (False, True):
        ask(server)
        if stream:
            events = dict(events_of(ask(server, stream=True)))
            usages = [events["message_start"]["message"]["usage"], events["message_delta"]["usage"]]
        else:
            usages = [ask(server).json()["usage"]]
        for usage in usages:
            assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (15, 16)


def test_a_stream_has_exactly_anthropics_events(server: str) -> None:
    response = ask(server, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    events = events_of(response)
    assert all(data["type"] == name for name, data in events)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[3:-3] == ["content_block_delta"] * len(ANSWER)
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    message = events[0][1]["message"]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    assert message["usage"]["output_tokens"] == 0
    assert events[1][1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert events[2][1] == {"type": "ping"}
    assert all(set(data["delta"]) == {"type", "text"} and data["index"] == 0 for _, data in events[3:-3])
    assert all(data["delta"]["type"] == "text_delta" for _, data in events[3:-3])
    assert "".join(data["delta"]["text"] for _, data in events[3:-3]) == ANSWER
    assert events[-3][1] == {"type": "content_block_stop", "index": 0}
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == len(ANSWER)
    assert events[-1][1] == {"type": "message_stop"}


def test_the_official_client_gets_the_same_message_at_once_and_as_a_stream(client: Anthropic) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 64, "messages": TURNS}
    client.messages.create(**fields)
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == ANSWER
        streamed = stream.get_final_message()
    assert whole.content[0].type == "text" and whole.content[0].text == ANSWER
    assert streamed.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    assert streamed.id.startswith("msg_") and streamed.usage.cache_read_input_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({}, ANSWER, "end_turn", None),
        ({"max_tokens": 3}, "Ans", "max_tokens", None),
        ({"stop_sequences": [":"]}, "Answer A", "stop_sequence", ":"),
        ({"stop_sequences": ["!"]}, ANSWER, "end_turn", None),
    ],
)
def test_the_stop_reason_tells_why_the_answer_ended(
    server: str, fields: dict[str, Any], text: str, reason: str, sequence: str | None, stream: bool
) -> None:
    response = ask(server, stream=stream, **fields)
    if stream:
        events = events_of(response)
        delta = dict(events)["message_delta"]["delta"]
        written = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    else:
        delta = response.json()
        written = delta["content"][0]["text"]
    assert (written, delta["stop_reason"], delta["stop_sequence"]) == (text, reason, sequence)


def test_system_and_content_are_text_or_blocks_of_text(server: str, engine: ApiEngine) -> None:
    blocks = [
        {"type": "text", "text": "Name "},
        {"type": "text", "text": "a boat.", "cache_control": {"type": "ephemeral"}},
    ]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        for content in ("Name a boat.", blocks):
            assert ask(server, system=system, messages=[{"role": "user", "content": content}]).status_code == 200
            assert last_prompt(engine) == expected


def test_turns_of_one_role_that_follow_each_other_are_one(server: str, engine: ApiEngine) -> None:
    turns = [{"role": "user", "content": "Name a boat."}, {"role": "user", "content": "A red one."}]
    assert ask(server, messages=turns).status_code == 200
    assert last_prompt(engine) == PROMPT.replace("a boat.", "a boat.\nA red one.")


def test_a_last_assistant_turn_is_where_the_answer_goes_on(server: str, engine: ApiEngine) -> None:
    assert ask(server, messages=[*TURNS, {"role": "assistant", "content": "The best name is ("}]).status_code == 200
    assert last_prompt(engine) == PROMPT + "The best name is ("
    assert engine.goes_on[-1] is True
    assert ask(server, messages=[*TURNS, {"role": "assistant", "content": "Ann."}, *TURNS]).status_code == 200
    assert last_prompt(engine) == PROMPT + "Ann.<|im_end|>\n" + PROMPT
    assert engine.goes_on[-1] is False


def test_parameters_reach_the_sampler(server: str, engine: ApiEngine) -> None:
    ask(server, temperature=0.3, top_p=0.5, top_k=7, stop_sequences=["x", "y"], max_tokens=5)
    params = engine.params[-1]
    assert (params.temperature, params.top_p, params.top_k) == (0.3, 0.5, 7)
    assert (params.stop, params.max_tokens) == (["x", "y"], 5)
    ask(server)
    assert (engine.params[-1].temperature, engine.params[-1].top_p, engine.params[-1].top_k) == (1.0, 1.0, 0)


def test_count_tokens_counts_the_prompt_and_runs_nothing(server: str, client: Anthropic, engine: ApiEngine) -> None:
    ask(server, system="Be brief.")
    before = len(engine.prompts)
    expected = len(engine.prompts[-1])
    assert count(server, system="Be brief.").json() == {"input_tokens": expected}
    assert client.messages.count_tokens(model=MODEL, messages=TURNS, system="Be brief.").input_tokens == expected
    assert len(engine.prompts) == before


def test_fields_that_real_clients_send_are_accepted(server: str) -> None:
    fields: Any = {"metadata": {"user_id": "me"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    fields |= {"tools": [], "thinking": {"type": "disabled"}, "stream": False, "stop_sequences": []}
    assert ask(server, **fields).status_code == 200
    assert count(server, tools=[], thinking={"type": "disabled"}).status_code == 200
    url = f"{server}/v1/messages?beta=true"
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-beta"}
    body = {"model": "mine", "max_tokens": 4, "messages": TURNS}
    assert httpx.post(url, json=body, headers=headers).json()["model"] == "mine"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PROMPT_REFUSALS: Any = [
    ({"tools": [{"name": "x", "type": "bash_20250124"}]}, "tools.0.input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"thinking": {"type": "adaptive"}}, "thinking"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}, "image blocks"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document blocks"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "x", "input": {}}]}]},
        "tool_use blocks",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
    ({"messages": []}, "messages"),
    ({"system": [IMAGE]}, "system"),
    ({"unknown_field": 1}, "unknown_field"),
]
MESSAGE_REFUSALS: Any = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"n": 2}, "n"),
    ({"container": "x"}, "container"),
    ({"messages": [{"role": "user", "content": "sea " * 3000}]}, "window is 8,192"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "name"), [*PROMPT_REFUSALS, *MESSAGE_REFUSALS])
def test_a_bad_field_is_a_400_that_names_it(server: str, fields: dict[str, Any], name: str, stream: bool) -> None:
    check_refusal(ask(server, **{"stream": stream} | fields), name)


@pytest.mark.parametrize(("fields", "name"), [*PROMPT_REFUSALS, ({"max_tokens": 5}, "max_tokens")])
def test_a_bad_field_of_count_tokens_is_a_400_that_names_it(server: str, fields: dict[str, Any], name: str) -> None:
    check_refusal(count(server, **fields), name)


def check_refusal(answer: httpx.Response, name: str) -> None:
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == "invalid_request_error"
    assert name in body["error"]["message"]


def test_max_tokens_is_required(server: str) -> None:
    answer = httpx.post(f"{server}/v1/messages", json={"model": MODEL, "messages": TURNS})
    check_refusal(answer, "max_tokens: Field required")


def test_the_official_client_raises_anthropics_errors(client: Anthropic) -> None:
    with pytest.raises(BadRequestError, match="container: Not supported here"):
        client.messages.create(model=MODEL, max_tokens=5, messages=TURNS, extra_body={"container": "x"})
    with pytest.raises(NotFoundError, match="not_found_error.*not served here"):
        client.messages.create(model="claude-opus-4-1", max_tokens=5, messages=TURNS)


def test_another_models_name_is_a_404_and_never_answered(server: str, engine: ApiEngine) -> None:
    before = len(engine.prompts)
    for refused in (
        ask(server, model="claude-opus-4-1"),
        count(server, model="x"),
        ask(server, model="x", stream=True),
    ):
        assert refused.status_code == 404
        assert refused.json()["error"]["type"] == "not_found_error"
    assert len(engine.prompts) == before


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_ends_the_answer_with_an_error(tmp_path: Path, stream: bool) -> None:
    engine = ApiEngine()
    with serving(tmp_path, engine) as server:
        engine.die_after = 2
        response = ask(server, stream=stream)
        if stream:
            name, body = events_of(response)[-1]
            assert (response.status_code, name) == (200, "error")
        else:
            body = response.json()
            assert response.status_code == 503
        assert body["type"] == "error" and body["error"]["type"] == "api_error"
        assert "ended unexpectedly" in body["error"]["message"]


def test_the_official_client_raises_an_error_within_a_stream(tmp_path: Path) -> None:
    engine = ApiEngine()
    with serving(tmp_path, engine) as server, Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        engine.die_after = 2
        with (
            pytest.raises(APIStatusError, match="ended unexpectedly"),
            client.messages.stream(model=MODEL, max_tokens=64, messages=TURNS) as stream,
        ):
            stream.until_done()


def test_a_client_that_goes_away_cancels_its_stream(tmp_path: Path) -> None:
    engine = ApiEngine()
    with serving(tmp_path, engine) as server:
        engine.hold = asyncio.Event()
        body = {"model": MODEL, "max_tokens": 64, "messages": TURNS, "stream": True}
        with httpx.stream("POST", f"{server}/v1/messages", json=body) as response:
            assert next(response.iter_lines()) == "event: message_start"
        wait_until(lambda: engine.closed)
        assert engine.ended == 0


def test_a_client_that_does_not_wait_cancels_its_request(tmp_path: Path) -> None:
    engine = ApiEngine()
    with serving(tmp_path, engine) as server:
        engine.hold = asyncio.Event()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server}/v1/messages", json={"model": MODEL, "max_tokens": 64, "messages": TURNS}, timeout=0.5)
        wait_until(lambda: engine.closed)
        assert engine.ended == 0


def test_where_there_is_a_key_x_api_key_carries_it_as_bearer_does(tmp_path: Path) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 64, "messages": TURNS}
    with serving(tmp_path, ApiEngine(), api_key="a key") as server:
        for own in ({"api_key": "a key"}, {"auth_token": "a key"}):
            with Anthropic(base_url=server, max_retries=0, **own) as client:  # type: ignore[arg-type]
                assert client.messages.create(**fields).stop_reason == "end_turn"
        for right in ({"x-api-key": "a key"}, {"Authorization": "Bearer a key"}):
            assert httpx.post(f"{server}/v1/messages", json=fields, headers=right).status_code == 200
        for headers in ({}, {"x-api-key": ""}, {"x-api-key": "another key"}):
            refused = httpx.post(f"{server}/v1/messages", json=fields, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "authentication_error"
        with (
            pytest.raises(AuthenticationError, match="API key is needed"),
            Anthropic(base_url=server, api_key="another key", max_retries=0) as client,
        ):
            client.messages.create(**fields)


@pytest.mark.slow
def test_the_real_engine_stops_goes_on_from_a_prefill_and_drops_who_goes_away(
    tmp_path: Path, default_model_path: Path
) -> None:
    turns: Any = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, three,"}]
    fields: Any = {"model": "real", "messages": turns, "stop_sequences": [" seven", " nine"]}
    fields |= {"max_tokens": 64, "extra_body": {"temperature": 0}}
    with (
        serving_default_model(tmp_path, default_model_path) as server,
        Anthropic(base_url=server, api_key="none", max_retries=0) as client,
    ):
        whole = client.messages.create(**fields)
        assert whole.content[0].type == "text" and whole.content[0].text == " four, five, six,"
        assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", " seven")
        num_tokens = client.messages.count_tokens(model="real", messages=turns).input_tokens
        assert whole.usage.input_tokens == num_tokens
        again = client.messages.create(**fields).usage
        assert again.cache_read_input_tokens == num_tokens // 16 * 16
        assert again.input_tokens == num_tokens % 16
        body = {"model": "real", "max_tokens": 2000, "messages": TURNS, "temperature": 2, "stream": True}
        with httpx.stream("POST", f"{server}/v1/messages", json=body) as response:
            next(response.iter_lines())
        wait_for_empty_pool(server)
