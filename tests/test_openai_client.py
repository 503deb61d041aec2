"""The official client's calls, sync and async, on a scripted engine: each method that a program may use."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import ANSWER, MODEL, ApiEngine, serving
from openai import AsyncOpenAI, NotFoundError, OpenAI
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": "Name a boat."}]
BOAT = {"name": "Selma", "sails": 2}
CALL = '<tool_call>{"name": "launch", "arguments": {"name": "Selma"}}</tool_call>'


class Boat(BaseModel):
    name: str
    sails: int


def answer(prompt: str, index: int) -> str:
    if "<tools>" in prompt:
        return CALL
    return json.dumps(BOAT) if "JSON" in prompt else ANSWER


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("client"), ApiEngine(answer=answer), ["owner/mine"]) as address:
        yield address


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed_and_told_one_by_one(client: OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names == ["owner/mine", MODEL]
    assert [client.models.retrieve(name).id for name in names] == names
    with pytest.raises(NotFoundError):
        client.models.retrieve("gpt-9")


def test_answers_are_parsed_into_a_class_of_the_callers(client: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "A boat as JSON."}]
    chat = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Boat)
    response = client.responses.parse(model=MODEL, input="A boat as JSON.", text_format=Boat, store=False)
    assert chat.choices[0].message.parsed == response.output_parsed == Boat(**BOAT)


def test_the_clients_own_stream_adds_up_to_a_completion(client: OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "launch", "parameters": {"type": "object"}}}
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, n=2) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [ANSWER, ANSWER]
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[tool]) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert "tool_calls.function.arguments.done" in kinds
    assert (call.function.name, json.loads(call.function.arguments)) == ("launch", {"name": "Selma"})


def test_raw_and_streamed_responses_carry_the_requests_id(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES)
    assert raw.headers["x-request-id"] and raw.parse().choices[0].message.content == ANSWER
    with client.completions.with_streaming_response.create(model=MODEL, prompt="A", max_tokens=3) as answer:
        assert json.loads(answer.read())["object"] == "text_completion"


def test_the_async_client_makes_the_same_calls_side_by_side(server: str) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
            chats = [client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2) for _ in range(8)]
            for made in await asyncio.gather(*chats):
                assert made.choices[0].message.content == ANSWER
            text = ""
            async for chunk in await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == ANSWER
            text = ""
            async for part in await client.completions.create(model=MODEL, prompt="A", stream=True, max_tokens=9):
                text += part.choices[0].text
            assert text == ANSWER[:9]
            assert (await client.responses.create(model=MODEL, input="A", store=False)).output_text == ANSWER
            text = ""
            async for event in await client.responses.create(model=MODEL, input="A", stream=True, store=False):
                text += event.delta if event.type == "response.output_text.delta" else ""
            assert text == ANSWER
            assert len((await client.embeddings.create(model=MODEL, input=["a", "b"])).data) == 2
            assert [model.id async for model in client.models.list()] == ["owner/mine", MODEL]

    asyncio.run(run())
