"""Tools in /v1/chat/completions, through the official client: on a scripted engine, and on the real model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import MODEL, ApiEngine, serving, serving_default_model
from openai import OpenAI

MESSAGES: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": PARAMETERS}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "Paris", "days": 2}


def answer(prompt: str, index: int) -> str:
    if "<tools>" not in prompt:
        return "No tools."
    return ["<think>\nHm.\n</think>\nLet me look.\n" + CALL, "It rains.", CALL + "\n" + CALL][index % 3]


@pytest.fixture(scope="module")
def engine() -> ApiEngine:
    return ApiEngine(answer=answer)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, engine: ApiEngine) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("tools"), engine) as address:
        yield address


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_each_choice_has_its_own_calls_text_and_reasoning(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[WEATHER], n=3)
    first, second, third = answer.choices
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "stop", "tool_calls"]
    assert (first.message.content, second.message.content, third.message.content) == ("Let me look.", "It rains.", None)
    assert first.message.reasoning_content == "Hm."  # type: ignore[attr-defined]
    assert second.message.tool_calls is None
    calls: Any = [*(first.message.tool_calls or []), *(third.message.tool_calls or [])]
    assert [(call.type, call.function.name) for call in calls] == [("function", "weather")] * 3
    assert all(json.loads(call.function.arguments) == ARGUMENTS for call in calls)
    assert len({call.id for call in calls}) == 3
    details: Any = answer.usage.completion_tokens_details  # type: ignore[union-attr]
    assert 0 < details.reasoning_tokens < details.choice_tokens[0]


def test_a_stream_adds_up_to_the_same(client: OpenAI) -> None:
    texts, reasons = ["", "", ""], ["", "", ""]
    calls: dict[tuple[int, int], Any] = {}
    for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[WEATHER], n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
            for call in choice.delta.tool_calls or []:
                assert (choice.index, call.index) not in calls
                calls[choice.index, call.index] = call
    assert texts == ["Let me look.", "It rains.", ""]
    assert reasons == ["tool_calls", "stop", "tool_calls"]
    assert sorted(calls) == [(0, 0), (2, 0), (2, 1)]
    assert all(json.loads(call.function.arguments) == ARGUMENTS and call.id for call in calls.values())


def test_the_prompt_tells_the_tools_the_calls_and_their_results(client: OpenAI, engine: ApiEngine) -> None:
    called: Any = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[WEATHER]).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "Rain."}
    turns = [*MESSAGES, called.to_dict(), result]
    client.chat.completions.create(model=MODEL, messages=turns, tools=[WEATHER, CLOCK])
    prompt = engine.tokenizer.decode(engine.prompts[-1])
    assert '"name": "weather", "description": "Tells."' in prompt and '"name": "clock"' in prompt
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
    assert call in prompt.split("assistant\n")[1]
    assert "<|im_start|>user\n<tool_response>\nRain.\n</tool_response><|im_end|>" in prompt


def test_tool_choice_none_hides_the_tools(client: OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice="none")
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("No tools.", "stop")


def test_without_parallel_calls_there_is_one(client: OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[WEATHER], parallel_tool_calls=False, n=3
    )
    assert len(made.choices[2].message.tool_calls or []) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [CLOCK], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"functions": []}, "functions"),
    ],
)
def test_what_is_wrong_with_tools_is_a_400_that_names_it(server: str, body: dict[str, Any], param: str) -> None:
    made = httpx.post(f"{server}/v1/chat/completions", json={"messages": MESSAGES} | body)
    assert made.status_code == 400, made.text
    assert made.json()["error"]["param"].split(".")[0] == param


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[OpenAI]:
    with (
        serving_default_model(tmp_path_factory.mktemp("real"), default_model_path) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def check_weather(call: Any) -> None:
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "days"} and arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9


@pytest.mark.slow
def test_a_required_call_follows_its_schema_in_every_choice(real: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    made = real.chat.completions.create(
        model="real", messages=MESSAGES, tools=[CLOCK, WEATHER], tool_choice=named, n=3, max_tokens=80
    )
    usage: Any = made.usage
    assert sum(usage.completion_tokens_details.choice_tokens) == usage.completion_tokens
    for choice in made.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        check_weather(call)
    made = real.chat.completions.create(
        model="real", messages=MESSAGES, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = made.choices[0].message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("clock", {})
    made = real.chat.completions.create(
        model="real", messages=MESSAGES, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = made.choices[0].message.tool_calls or []
    check_weather(call)


@pytest.mark.slow
def test_strict_functions_and_answers_in_json_go_together(real: OpenAI) -> None:
    strict: Any = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    begun: Any = [*MESSAGES, {"role": "user", "content": f"Answer with exactly this:\n{CALL}"}]
    made = real.chat.completions.create(model="real", messages=begun, tools=[strict], n=4, max_tokens=70, seed=3)
    calls = [call for choice in made.choices for call in choice.message.tool_calls or []]
    assert calls
    for call in calls:
        check_weather(call)
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["wet", "dry"]}}}
    made = real.chat.completions.create(
        model="real", messages=MESSAGES, tools=[strict], n=4, response_format=form, max_tokens=90, seed=1
    )
    for choice in made.choices:
        if choice.message.tool_calls:
            check_weather(choice.message.tool_calls[0])
        else:
            assert json.loads(choice.message.content or "") in ("wet", "dry")
