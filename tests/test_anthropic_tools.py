"""Tools and thinking in Anthropic's /v1/messages, through the official client, on a scripted engine."""

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from api_server import MODEL, ApiEngine, serving

TURNS: Any = [{"role": "user", "content": "Name a boat."}]
TOOL: Any = {
    "name": "weather",
    "description": "Tells.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\nLet me look.\n"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Anthropic, ApiEngine]]:
    engine = ApiEngine(answer=lambda prompt, index: THOUGHT + CALL if "<tools>" in prompt else "No tools.")
    with (
        serving(tmp_path_factory.mktemp("agent"), engine) as address,
        Anthropic(base_url=address, api_key="none", max_retries=0) as client,
    ):
        yield client, engine


def test_thoughts_words_and_calls_are_blocks_whole_and_streamed(agent: tuple[Anthropic, ApiEngine]) -> None:
    client, _ = agent
    made = client.messages.create(model=MODEL, max_tokens=200, messages=TURNS, tools=[TOOL])
    with client.messages.stream(model=MODEL, max_tokens=200, messages=TURNS, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    for message in (made, streamed):
        assert message.stop_reason == "tool_use"
        thought, words, call = message.content
        assert (thought.type, words.type, call.type) == ("thinking", "text", "tool_use")
        assert (thought.thinking, words.text) == ("Hm.", "Let me look.")  # type: ignore[union-attr]
        assert (call.name, call.input) == ("weather", {"city": "Paris"})  # type: ignore[union-attr]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_a_calls_result_goes_back_to_the_model(agent: tuple[Anthropic, ApiEngine]) -> None:
    client, engine = agent
    made = client.messages.create(model=MODEL, max_tokens=200, messages=TURNS, tools=[TOOL])
    call: Any = made.content[-1]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain."}]}
    turns = [
        *TURNS,
        {"role": "assistant", "content": [block.to_dict() for block in made.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    client.messages.create(model=MODEL, max_tokens=200, messages=turns, tools=[TOOL])
    prompt = engine.tokenizer.decode(engine.prompts[-1])
    assert "Let me look.\n<tool_call>\n" in prompt and '"arguments": {"city": "Paris"}' in prompt
    assert "<tool_response>\nRain.\n</tool_response><|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>" in prompt
    counted = client.messages.count_tokens(model=MODEL, messages=turns, tools=[TOOL])
    assert counted.input_tokens == len(engine.prompts[-1])


def test_a_choice_of_tools_asks_for_a_call_or_hides_them(agent: tuple[Anthropic, ApiEngine]) -> None:
    client, engine = agent
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        client.messages.create(model=MODEL, max_tokens=9, messages=TURNS, tools=[TOOL], tool_choice=choice)  # type: ignore[arg-type]
        wanted = engine.params[-1].structured_outputs
        assert wanted is not None and wanted.grammar is not None
    made = client.messages.create(model=MODEL, max_tokens=9, messages=TURNS, tools=[TOOL], tool_choice={"type": "none"})
    assert made.content[0].text == "No tools."  # type: ignore[union-attr]
