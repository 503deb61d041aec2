"""/v1/responses, through the official client and plain HTTP, on a scripted engine."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_server import ANSWER, MODEL, ApiEngine, serving, wait_until
from openai import BadRequestError, NotFoundError, OpenAI

THOUGHT = "<think>\nHm, boats.\n</think>\n\nCall it *Selma*."


def answer(prompt: str, index: int) -> str:
    question = prompt.rsplit("<|im_start|>user\n", 1)[1]
    return THOUGHT if "Think" in question else "word " * 400 if "Write" in question else ANSWER


@pytest.fixture(scope="module")
def engine() -> ApiEngine:
    return ApiEngine(answer=answer)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, engine: ApiEngine) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("responses"), engine, ["mine"]) as address:
        yield address


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(server: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server}/v1/responses", json={"model": MODEL, "input": "Name a boat."} | fields)


def conversations(server: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{server}/api/conversations").json()["conversations"]
    return found


def last_prompt(engine: ApiEngine) -> str:
    return engine.tokenizer.decode(engine.prompts[-1])


def test_an_answer_is_a_turn_of_a_conversation_and_the_next_one_goes_on_from_it(
    client: OpenAI, server: str, engine: ApiEngine
) -> None:
    first = client.responses.create(model="mine", input="Name a boat.", instructions="Be brief.", temperature=0.5)
    assert (first.status, first.output_text, first.model, first.error) == ("completed", ANSWER, "mine", None)
    assert first.usage is not None and first.usage.output_tokens > 0
    assert first.usage.input_tokens == len(engine.prompts[-1])
    assert engine.params[-1].temperature == 0.5
    newest = conversations(server)[0]
    assert newest["title"] == "Name a boat."
    shown = httpx.get(f"{server}/api/conversations/{newest['id']}").json()
    assert [turn["message"]["text"] for turn in shown["turns"]] == ["Name a boat.", ANSWER]
    second = client.responses.create(model=MODEL, input="Another one.", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    # As with OpenAI, instructions are not carried over.
    assert last_prompt(engine) == (
        f"<|im_start|>user\nName a boat.<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>\n"
        "<|im_start|>user\nAnother one.<|im_end|>\n<|im_start|>assistant\n"
    )
    # A second answer to the same is a branch.
    third = client.responses.create(model=MODEL, input="A third one.", previous_response_id=first.id)
    assert third.usage is not None and third.usage.input_tokens_details.cached_tokens > 0
    shown = httpx.get(f"{server}/api/conversations/{newest['id']}").json()
    assert [len(turn["siblings"]) for turn in shown["turns"]] == [1, 1, 2, 1]
    assert len({first.id, second.id, third.id}) == 3


def test_a_stored_response_can_be_read_and_deleted(client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Name a boat.", instructions="Brief.", max_output_tokens=7)
    read = client.responses.retrieve(made.id)
    assert (read.status, made.status) == ("incomplete", "incomplete")
    assert read.incomplete_details is not None and read.incomplete_details.reason == "max_output_tokens"
    assert (read.output_text, read.instructions, read.max_output_tokens) == (ANSWER[:7], "Brief.", 7)
    assert read.usage == made.usage
    client.responses.delete(made.id)
    for response_id in (made.id, "resp_x", "resp_99999999"):
        with pytest.raises(NotFoundError):
            client.responses.retrieve(response_id)
    with pytest.raises(NotFoundError, match="no response"):
        client.responses.create(model=MODEL, input="More.", previous_response_id=made.id)


def test_nothing_is_kept_where_that_is_declined(client: OpenAI, server: str, engine: ApiEngine) -> None:
    first = client.responses.create(model=MODEL, input="Name a boat.")
    before = conversations(server)
    second = client.responses.create(model=MODEL, input="More.", previous_response_id=first.id, store=False)
    assert second.output_text == ANSWER and not second.store
    assert ANSWER in last_prompt(engine) and conversations(server) == before
    with pytest.raises(NotFoundError):
        client.responses.retrieve(second.id)


@pytest.mark.parametrize("store", [True, False])
def test_a_stream_has_every_event_in_order_and_adds_up(client: OpenAI, store: bool) -> None:
    with client.responses.stream(model=MODEL, input="Think of a boat.", store=store) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    order = list(dict.fromkeys(kinds[2:]))
    assert order == [
        "response.output_item.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_item.done",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.completed",
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Call it *Selma*."
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "Hm, boats."
    assert final.output_text == "Call it *Selma*." and [item.type for item in final.output] == ["reasoning", "message"]
    assert final.usage is not None
    assert final.usage.output_tokens_details.reasoning_tokens == len("Hm, boats.")


def test_turns_and_a_system_message_may_be_given_at_once(client: OpenAI, server: str, engine: ApiEngine) -> None:
    turns: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hi.", "annotations": []}],
        },
        {"role": "user", "content": "Name a boat."},
    ]
    client.responses.create(model=MODEL, input=turns, instructions="Be brief.")
    assert "system\nBe brief.\n\nBe kind.<|im_end|>\n<|im_start|>user\nHello<" in last_prompt(engine)
    shown = httpx.get(f"{server}/api/conversations/{conversations(server)[0]['id']}").json()
    assert [turn["message"]["role"] for turn in shown["turns"]] == ["user", "assistant", "user", "assistant"]


def test_answers_may_have_to_follow_a_schema(server: str, engine: ApiEngine) -> None:
    form = {"type": "json_schema", "name": "boat", "schema": {"type": "object"}, "strict": True}
    assert post(server, text={"format": form}).json()["text"]["format"]["type"] == "json_schema"
    assert engine.params[-1].structured_outputs is not None and engine.params[-1].structured_outputs.json is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "input.1.role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.items.0.type"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"unknown": 1}, "unknown"),
        ({"previous_response_id": "resp_77777"}, "previous_response_id"),
        ({"model": "gpt-9"}, "model"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_stored(server: str, body: dict[str, Any], param: str) -> None:
    before = conversations(server)
    for stream in (False, True):
        answer = post(server, stream=stream, **body)
        assert answer.status_code == (404 if param in ("model", "previous_response_id") else 400), answer.text
        assert answer.json()["error"]["param"] == param
    assert conversations(server) == before


def test_a_prompt_that_is_too_long_leaves_nothing_behind(server: str, client: OpenAI) -> None:
    before = conversations(server)
    with pytest.raises(BadRequestError, match="window"):
        client.responses.create(model=MODEL, input="boat " * 3000)
    assert conversations(server) == before
    kept = client.responses.create(model=MODEL, input="Name a boat.")
    with pytest.raises(BadRequestError, match="window"):
        client.responses.create(model=MODEL, input="boat " * 3000, previous_response_id=kept.id)
    several: Any = [{"role": role, "content": "boat " * 3000} for role in ("user", "assistant", "user")]
    with pytest.raises(BadRequestError, match="window"):
        client.responses.create(model=MODEL, input=several, previous_response_id=kept.id)
    newest = conversations(server)[0]["id"]
    assert len(httpx.get(f"{server}/api/conversations/{newest}").json()["turns"]) == 2
    assert len(httpx.get(f"{server}/api/conversations/{newest}/tree").json()["messages"]) == 2


def test_a_second_answer_at_once_in_one_conversation_is_refused_and_leaves_nothing(
    server: str, engine: ApiEngine
) -> None:
    first = post(server).json()["id"]
    conversation = conversations(server)[0]["id"]
    hold = asyncio.Event()
    engine.hold = hold
    try:
        body = {"input": "A", "previous_response_id": first, "stream": True}
        with httpx.stream("POST", f"{server}/v1/responses", json=body) as running:
            # Kept: a connection is closed with its iterator.
            lines = running.iter_lines()
            next(lines)
            tree = httpx.get(f"{server}/api/conversations/{conversation}/tree").json()
            refused = post(server, input="B", previous_response_id=first)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conversation_busy")
            after = httpx.get(f"{server}/api/conversations/{conversation}/tree").json()
            assert [m["id"] for m in after["messages"]] == [m["id"] for m in tree["messages"]]
            assert [m["chosen"] for m in after["messages"]] == [m["chosen"] for m in tree["messages"]]
    finally:
        engine.hold = None
        hold.set()
    wait_until(lambda: httpx.get(f"{server}/api/conversations/{conversation}").json()["job"] is None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_the_answer(server: str, engine: ApiEngine, stream: bool) -> None:
    hold = asyncio.Event()
    engine.hold, cancelled = hold, len(engine.cancelled)
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server}/v1/responses", json={"input": "Write on.", "stream": stream}, timeout=0.6)
        wait_until(lambda: len(engine.cancelled) > cancelled)
    finally:
        engine.hold = None
        hold.set()
    newest = conversations(server)[0]["id"]
    wait_until(lambda: httpx.get(f"{server}/api/conversations/{newest}").json()["job"] is None)
