"""Tools and thinking in Ollama's /api/chat and /api/generate, through the official client, on a scripted engine."""

from contextlib import closing
from pathlib import Path
from typing import Any

from api_server import MODEL, ApiEngine, serving
from ollama import Client

MESSAGES: Any = [{"role": "user", "content": "Name a boat."}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": {}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def test_tools_and_thoughts_through_the_official_client(tmp_path: Path) -> None:
    def answer(prompt: str, index: int) -> str:
        return "It rains." if "<tool_response>" in prompt else "<think>\nHm.\n</think>\n\nLet me look.\n" + CALL

    engine = ApiEngine(answer=answer)
    with serving(tmp_path, engine) as address, closing(Client(address)) as client:
        made = client.chat(MODEL, MESSAGES, tools=[WEATHER], think=True)
        message = made.message
        assert (message.content, message.thinking) == ("Let me look.", "Hm.")
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert (call.function.name, dict(call.function.arguments)) == ("weather", {"city": "Paris"})
        pieces = [piece.message for piece in client.chat(MODEL, MESSAGES, tools=[WEATHER], stream=True)]
        assert "".join(piece.content or "" for piece in pieces) == "Let me look."
        assert "".join(piece.thinking or "" for piece in pieces) == "Hm."
        assert sum(len(piece.tool_calls or []) for piece in pieces) == 1
        turns = [*MESSAGES, message, {"role": "tool", "content": "Rain.", "tool_name": "weather"}]
        assert client.chat(MODEL, turns, tools=[WEATHER]).message.content == "It rains."
        prompt = engine.tokenizer.decode(engine.prompts[-1])
        assert '{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
        assert "<tool_response>\nRain.\n</tool_response>" in prompt
        assert client.generate(MODEL, "Hello").thinking == "Hm."
