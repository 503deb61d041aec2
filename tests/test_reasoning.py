"""What a model thinks is parted from what it answers, however the text is cut; and so the OpenAI API tells it."""

from collections.abc import Iterator
from typing import Any

import pytest
from api_server import MODEL, ApiEngine, serving
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from localpaged.server.reasoning import ReasoningSplitter, begins_within

CASES = [
    # text, begun, reasoning, answer
    ("Hello", False, "", "Hello"),
    ("<think>\nplan a\nplan b\n</think>\n\nHello <b>you</b>", False, "plan a\nplan b", "Hello <b>you</b>"),
    ("\n<think>plan</think>Hello", False, "plan", "Hello"),
    ("plan\n</think>\n\nHello", True, "plan", "Hello"),
    ("<think>cut off\n", False, "cut off", ""),
    ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
    ("<thin", False, "", "<thin"),
    ("<thinking>x</thinking>", False, "", "<thinking>x</thinking>"),
    ("Say <think>x</think>", False, "", "Say <think>x</think>"),
    ("<think>a</thin b</think>c", False, "a</thin b", "c"),
    ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ("", False, "", ""),
    ("", True, "", ""),
    ("  leading", False, "", "  leading"),
]


def split(pieces: list[str], begun: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(begun)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(("text", "begun", "reasoning", "answer"), CASES)
def test_reasoning_and_answer_are_parted_whole_and_by_characters(
    text: str, begun: bool, reasoning: str, answer: str
) -> None:
    assert split([text], begun) == (reasoning, answer)
    assert split(list(text), begun) == (reasoning, answer)


@given(st.data())
def test_where_the_text_is_cut_changes_nothing(data: st.DataObject) -> None:
    text = "".join(
        data.draw(st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", "<", "/", "th", " "]), max_size=9))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    begun = data.draw(st.booleans())
    assert split(pieces, begun) == split([text], begun)


def test_a_prompt_may_end_within_a_thought() -> None:
    assert begins_within("<|im_start|>assistant\n<think>\n")
    assert not begins_within("<think>\n\n</think>\n\n")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    engine = ApiEngine(answer=lambda prompt, index: f"<think>\nplan {index}\n</think>\n\nanswer {index}")
    with (
        serving(tmp_path_factory.mktemp("reasoning"), engine) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_the_openai_api_has_both_parts_of_every_choice(client: OpenAI) -> None:
    turns: Any = [
        {"role": "user", "content": "Think."},
        {"role": "assistant", "content": "b", "reasoning_content": "a"},
    ]
    turns.append({"role": "user", "content": "Again."})
    answer = client.chat.completions.create(model=MODEL, messages=turns, n=2)
    for index, choice in enumerate(answer.choices):
        assert choice.message.content == f"answer {index}"
        assert choice.message.model_extra is not None
        assert choice.message.model_extra["reasoning_content"] == f"plan {index}"


def test_a_stream_has_the_reasoning_first(client: OpenAI) -> None:
    thought, said = ["", ""], ["", ""]
    turns: Any = [{"role": "user", "content": "Think."}]
    for chunk in client.chat.completions.create(model=MODEL, messages=turns, n=2, stream=True):
        for choice in chunk.choices:
            piece = (choice.delta.model_extra or {}).get("reasoning_content") or ""
            assert not (piece and said[choice.index])
            thought[choice.index] += piece
            said[choice.index] += choice.delta.content or ""
    assert (thought, said) == (["plan 0", "plan 1"], ["answer 0", "answer 1"])


def test_plain_completions_stay_as_they_are(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=64)
    assert answer.choices[0].text.startswith("<think>")
