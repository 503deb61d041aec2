"""Calls of tools in every form that models write them, whole and in pieces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localpaged.server.tool_calls import ToolCallParser

NAMES = ["weather", "get_time"]
PARIS = {"city": "Paris", "days": 3}
BRACES = {"city": 'a "}" and a {', "days": 1}
JSON_CALL = '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}'
FORMS: list[tuple[str, str, list[tuple[str, Any]]]] = [
    (f"<tool_call>\n{JSON_CALL}\n</tool_call>", "", [("weather", PARIS)]),
    (f"Let me see.\n<tool_call>{JSON_CALL}</tool_call>\n", "Let me see.", [("weather", PARIS)]),
    (f"<tool_call>\n[{JSON_CALL}, {JSON_CALL}]\n</tool_call>", "", [("weather", PARIS)] * 2),
    (
        f'<tool_call>{JSON_CALL}</tool_call>\n<tool_call>{{"name": "get_time", "arguments": {{}}}}</tool_call> Done.',
        " Done.",
        [("weather", PARIS), ("get_time", {})],
    ),
    # The tag that closes it may be the token that ends the answer.
    (f"Well. <tool_call>{JSON_CALL}", "Well.", [("weather", PARIS)]),
    # A model may invent a function: whoever asked can tell it so.
    ('<tool_call>{"name": "fly", "arguments": {}}</tool_call>', "", [("fly", {})]),
    (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("weather", PARIS)],
    ),
    ('<function=weather>{"city": "Paris", "days": 3}</function>', "", [("weather", PARIS)]),
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [("weather", PARIS)],
    ),
    ('{"name": "weather", "parameters": {"city": "Paris", "days": 3}}', "", [("weather", PARIS)]),
    (
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 3}}; '
        '{"name": "get_time", "parameters": {}}',
        "",
        [("weather", PARIS), ("get_time", {})],
    ),
    (json.dumps([{"name": "weather", "arguments": BRACES}]), "", [("weather", BRACES)]),
    (f"[TOOL_CALLS][{JSON_CALL}]", "", [("weather", PARIS)]),
    ('weather[ARGS]{"city": "Paris", "days": 3}get_time[ARGS]{}', "", [("weather", PARIS), ("get_time", {})]),
    ('weather{"city": "Paris", "days": 3}', "", [("weather", PARIS)]),
    ("[weather(city='Paris', days=3), get_time()]", "", [("weather", PARIS), ("get_time", {})]),
    (
        json.dumps({"type": "function", "function": {"name": "weather", "arguments": json.dumps(PARIS)}}),
        "",
        [("weather", PARIS)],
    ),
]
TEXTS = [
    "It is sunny.\n\nAnd warm. ",
    "",
    "  ",
    '{"name": "Bob", "age": 7}',
    '{"colour": "blue"}',
    "[1, 2, 3]",
    "[weather(city=open('/etc/passwd'))]",
    "[weather('Paris')]",
    "weather is what we talk about",
    "<tool_call>no JSON</tool_call> and <tool_call>",
    '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '{"name": "weather", "arguments": {"city": "Par',
    "a < b and <tool is none",
    "<function=weather>{</function>",
    '[{"name": "weather", "arguments": {}}, 3]',
]


def parse(pieces: list[str], most: int | None = None) -> tuple[str, list[tuple[str, Any]]]:
    parser = ToolCallParser(NAMES, most)
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    calls = [call for _, calls in parts for call in calls]
    assert calls == parser.calls
    return "".join(text for text, _ in parts), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("answer", "text", "calls"), FORMS)
def test_every_form_is_found_whole_and_letter_by_letter(answer: str, text: str, calls: list[tuple[str, Any]]) -> None:
    assert parse([answer]) == (text, calls)
    assert parse(list(answer)) == (text, calls)


@pytest.mark.parametrize("text", TEXTS)
def test_what_only_looks_like_a_call_stays_text_to_the_letter(text: str) -> None:
    assert parse([text]) == (text, [])
    assert parse(list(text)) == (text, [])


PARTS = ["<tool_call>", "</tool_call>", JSON_CALL, "[", "]", "weather", "{}", "<function=weather>", "</function>"]


@given(st.lists(st.sampled_from([*PARTS, "\n", " ", "a", "<", "<tool", "[TOOL_CALLS]", ";"])), st.integers(1, 20))
def test_pieces_never_change_what_is_found(parts: list[str], size: int) -> None:
    text = "".join(parts)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert parse(pieces) == parse([text])


def test_text_is_told_as_soon_as_no_call_can_begin_in_it() -> None:
    parser = ToolCallParser(NAMES)
    assert parser.push("It") == ("It", [])
    assert parser.push(" is <b") == (" is <b", [])
    assert parser.push("> <tool") == (">", [])
    assert parser.push("box") == (" <toolbox", [])


def test_calls_beyond_the_most_are_left_out() -> None:
    assert parse([FORMS[3][0]], most=1) == (" Done.", [("weather", PARIS)])


def test_ids_differ_and_are_as_mistrals_templates_want_them() -> None:
    parser = ToolCallParser(NAMES)
    parser.push(FORMS[2][0])
    ids = [call.id for call in parser.calls]
    assert len(set(ids)) == 2 and all(len(one) == 9 and one.isalnum() for one in ids)
