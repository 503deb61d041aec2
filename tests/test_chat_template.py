"""What a model's own template is told of tools and of thinking, and what stands in where it knows neither."""

from pathlib import Path
from typing import Any

import pytest

from localpaged.errors import InvalidRequestError
from localpaged.models.chat_tokenizer import ChatTokenizer, load_tokenizer
from localpaged.models.tool_prompt import with_tools_as_text

TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLED: Any = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}],
}
RESULT: Any = {"role": "tool", "content": "Rain.", "tool_call_id": "1"}
USER: Any = {"role": "user", "content": "Weather?"}
OWN = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}({{ m.role }} {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %})"
    "{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.fixture
def tokenizer(default_model_path: Path) -> ChatTokenizer:
    return load_tokenizer(default_model_path)


@pytest.fixture
def knowing(tokenizer: ChatTokenizer) -> ChatTokenizer:
    """One whose template writes tools and can be told not to think."""
    tokenizer._tokenizer.chat_template = OWN
    return tokenizer


def test_a_template_that_knows_tools_gets_them_and_arguments_as_objects(knowing: ChatTokenizer) -> None:
    assert knowing.knows_tools and knowing.tags_tool_calls
    rendered = knowing.render_chat([USER, CALLED, RESULT], tools=TOOLS)
    assert rendered == '[weather](user Weather?)(assistant <tool_call>{"city": "Paris"}</tool_call>)(tool Rain.)'


def test_a_template_that_knows_none_gets_them_as_text(tokenizer: ChatTokenizer) -> None:
    assert not tokenizer.knows_tools and tokenizer.tags_tool_calls
    rendered = tokenizer.render_chat([USER, CALLED, RESULT, RESULT | {"content": "Sun."}], tools=TOOLS)
    assert rendered.startswith("<|im_start|>system\nYou can call these functions.")
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>' in rendered
    results = "<tool_response>\nRain.\n</tool_response>\n<tool_response>\nSun.\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in rendered


def test_a_system_prompt_stays_before_the_tools_and_nothing_is_changed_in_place() -> None:
    messages: Any = [{"role": "system", "content": "Be kind."}, USER, RESULT, RESULT]
    before = [dict(message) for message in messages]
    written = with_tools_as_text(messages, TOOLS)
    assert written[0]["content"].startswith("Be kind.\n\nYou can call")
    assert messages == before
    assert with_tools_as_text([USER], None) == [USER]


def test_thinking_is_switched_where_the_template_can(knowing: ChatTokenizer) -> None:
    assert knowing.render_chat([USER], think=False).endswith("<think></think>")
    assert not knowing.render_chat([USER], think=True).endswith("<think></think>")
    assert not knowing.render_chat([USER]).endswith("<think></think>")


def test_a_model_that_does_not_think_says_so(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="does not think"):
        tokenizer.render_chat([USER], think=True)
    assert tokenizer.render_chat([USER], think=False) == tokenizer.render_chat([USER])
