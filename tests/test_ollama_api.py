"""The Ollama-compatible API as programs use it: the official client and plain HTTP, on a scripted engine."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from api_server import ANSWER, MODEL, ApiEngine, serving, serving_default_model, wait_for_empty_pool, wait_until
from ollama import Client, ResponseError

from localpaged import __version__
from localpaged.server import anthropic_api, chat_api, kv_api, ollama_api, openai_api
from localpaged.server.ollama_schema import INERT, NEUTRAL

MESSAGES: Any = [{"role": "user", "content": "Name a boat."}]
PROMPT = "<|im_start|>user\nName a boat.<|im_end|>\n<|im_start|>assistant\n"
COUNTS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}
FINAL = {"model", "created_at", "done", "done_reason"} | COUNTS


@pytest.fixture(scope="module")
def engine() -> ApiEngine:
    return ApiEngine()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, engine: ApiEngine) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("ollama"), engine, ["mine"]) as address:
        yield address


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[Client]:
    with closing(Client(server)) as client:
        yield client


def ask(server: str, path: str = "chat", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "stream": False} | (
        {"messages": MESSAGES} if path == "chat" else {"prompt": "Name a boat."}
    )
    return httpx.post(f"{server}/api/{path}", json=body | fields)


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in response.text.splitlines()]


def test_chat_answers_at_once_with_counts_and_durations(server: str, engine: ApiEngine) -> None:
    answer = ask(server).json()
    assert set(answer) == FINAL | {"message"}
    assert answer["message"] == {"role": "assistant", "content": ANSWER}
    assert (answer["model"], answer["done"], answer["done_reason"]) == (MODEL, True, "stop")
    assert engine.tokenizer.decode(engine.prompts[-1]) == PROMPT
    assert answer["prompt_eval_count"] == len(engine.prompts[-1])
    assert answer["eval_count"] == len(ANSWER)
    assert all(isinstance(answer[name], int) and answer[name] >= 0 for name in COUNTS)
    parts = answer["load_duration"] + answer["prompt_eval_duration"] + answer["eval_duration"]
    assert 0 < parts <= answer["total_duration"]


@pytest.mark.parametrize(("path", "piece"), [("chat", "message"), ("generate", "response")])
def test_a_stream_is_lines_of_json_and_the_default(server: str, path: str, piece: str) -> None:
    response = ask(server, path, stream=None)
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.headers["x-accel-buffering"] == "no"
    *pieces, last = lines_of(response)
    texts = [line[piece] if path == "generate" else line[piece]["content"] for line in pieces]
    assert len(texts) == len(ANSWER) and "".join(texts) == ANSWER
    for line in pieces:
        assert set(line) == {"model", "created_at", piece, "done"}
        assert line["done"] is False
    assert set(last) == FINAL | {piece}
    assert last[piece] == ("" if path == "generate" else {"role": "assistant", "content": ""})
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", len(ANSWER))


def test_the_official_client_chats_and_streams(client: Client) -> None:
    answer = client.chat(MODEL, MESSAGES, options={"num_predict": 6}, keep_alive="5m")
    assert answer.message.content == "Answer"
    assert answer.done_reason == "length"
    pieces = list(client.chat(MODEL, MESSAGES, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == ANSWER
    assert pieces[-1].done and pieces[-1].created_at


def test_the_official_client_generates_and_streams(client: Client) -> None:
    assert client.generate(MODEL, "Name a boat.").response == ANSWER
    assert "".join(piece.response or "" for piece in client.generate(MODEL, "Name a boat.", stream=True)) == ANSWER


def test_generate_wraps_prompt_and_system_in_the_template(server: str, engine: ApiEngine) -> None:
    assert ask(server, "generate", system="Be brief.").json()["response"] == ANSWER
    assert engine.tokenizer.decode(engine.prompts[-1]) == "<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT
    assert engine.goes_on[-1] is False


def test_a_raw_prompt_goes_to_the_model_as_it_is(server: str, engine: ApiEngine) -> None:
    ask(server, "generate", raw=True, prompt="One, two,")
    assert engine.tokenizer.decode(engine.prompts[-1]) == "<|im_start|>One, two,"
    assert engine.goes_on[-1] is True


def test_options_reach_the_sampler_under_the_engines_names(server: str, engine: ApiEngine) -> None:
    options = {"temperature": 0.3, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 9, "num_predict": 5, "stop": ["x"]}
    options |= {"repeat_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.6, "num_ctx": 100}
    assert ask(server, options=options).status_code == 200
    params = engine.params[-1]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.3, 7, 0.5, 0.1)
    assert (params.seed, params.max_tokens, params.stop) == (9, 5, ["x"])
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.4, 0.6)


def test_options_left_out_have_ollamas_defaults(server: str, engine: ApiEngine) -> None:
    assert ask(server).status_code == 200
    params = engine.params[-1]
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.8, 40, 0.9, None)
    assert (params.repetition_penalty, params.seed) == (1.0, None)


def test_a_top_k_of_zero_or_less_keeps_every_token_and_seed_minus_one_is_a_fresh_one(
    server: str, engine: ApiEngine
) -> None:
    assert ask(server, options={"top_k": -1, "seed": -1}).status_code == 200
    assert (engine.params[-1].top_k, engine.params[-1].seed) == (0, None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_predict": -1, "num_ctx": 100}, None),
        ({"num_predict": -2}, None),
        ({"num_predict": -2, "num_ctx": 8192}, None),
        ({"num_predict": -2, "num_ctx": 100}, 100 - 31),
    ],
)
def test_num_predict_minus_one_goes_on_and_minus_two_fills_the_context(
    server: str, engine: ApiEngine, options: dict[str, int], expected: int | None
) -> None:
    assert ask(server, options=options).status_code == 200
    assert len(engine.prompts[-1]) == 31
    assert engine.params[-1].max_tokens == expected


def test_an_answer_that_is_cut_or_stopped_says_so(server: str) -> None:
    cut = ask(server, options={"num_predict": 3}).json()
    assert (cut["message"]["content"], cut["done_reason"], cut["eval_count"]) == ("Ans", "length", 3)
    stopped = ask(server, options={"stop": ":"}).json()
    assert (stopped["message"]["content"], stopped["done_reason"]) == ("Answer A", "stop")


def test_options_that_change_nothing_are_accepted(server: str) -> None:
    options = dict.fromkeys(INERT, 1) | NEUTRAL
    fields = {"keep_alive": -1, "format": "", "think": False, "tools": [], "truncate": False, "top_logprobs": 0}
    messages = [MESSAGES[0] | {"images": None, "tool_calls": [], "thinking": ""}]
    assert ask(server, messages=messages, options=options, **fields).status_code == 200
    assert ask(server, options=None, format=None, think=None, tools=None).status_code == 200
    assert ask(server, "generate", suffix="", context=[], template="", images=[], raw=False).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"format": "xml"}, "format"),
        ({"format": 3}, "format"),
        ({"think": "a lot"}, "think"),
        ({"logprobs": True}, "logprobs"),
        ({"truncate": True}, "truncate"),
        ({"unknown_field": 1}, "unknown_field"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages.0.images"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"options": {"unknown_option": 1}}, "options.unknown_option"),
        ({"options": {"mirostat": 1}}, "mirostat"),
        ({"options": {"repeat_last_n": 64}}, "repeat_last_n"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"repeat_penalty": 0}}, "repeat_penalty"),
        ({"options": {"num_predict": 0}}, "num_predict"),
        ({"options": {"num_predict": -3}}, "num_predict"),
        ({"options": {"num_predict": -2, "num_ctx": 31}}, "num_ctx"),
        ({"options": {"num_ctx": 0}}, "num_ctx"),
        ({"options": {"stop": [""]}}, "stop"),
        ({"options": []}, "options"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(server: str, fields: dict[str, Any], name: str, stream: bool) -> None:
    answer = ask(server, **{"stream": stream} | fields)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"}
    assert name in answer.json()["error"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"suffix": "}"}, "suffix"),
        ({"images": ["aGk="]}, "images"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"raw": True, "system": "Be brief."}, "system"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
def test_a_bad_field_of_generate_is_a_400_that_names_it(server: str, fields: dict[str, Any], name: str) -> None:
    answer = ask(server, "generate", **fields)
    assert answer.status_code == 400, answer.text
    assert name in answer.json()["error"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]"])
def test_a_body_that_is_no_object_is_a_400(server: str, content: bytes) -> None:
    answer = httpx.post(f"{server}/api/chat", content=content)
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}


def test_a_num_ctx_beyond_the_window_says_both_numbers(client: Client) -> None:
    with pytest.raises(ResponseError, match="num_ctx is 8,193 and the model's window is 8,192") as caught:
        client.chat(MODEL, MESSAGES, options={"num_ctx": 8193})
    assert caught.value.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_400_before_the_stream_begins(server: str, stream: bool) -> None:
    answer = ask(server, messages=[{"role": "user", "content": "sea " * 3000}], stream=stream)
    assert answer.status_code == 400
    assert "window is 8,192" in answer.json()["error"]


@pytest.mark.parametrize("name", [MODEL, "mine", f"{MODEL}:latest", "mine:latest"])
def test_the_model_answers_to_its_names_with_and_without_latest(server: str, name: str) -> None:
    for path in ("chat", "generate"):
        assert ask(server, path, model=name).json()["model"] == name
    assert httpx.post(f"{server}/api/show", json={"model": name}).status_code == 200


@pytest.mark.parametrize("name", ["llama3.2", f"{MODEL}:8b", "mine:latest:latest", ":latest", ""])
def test_another_models_name_is_a_404_and_never_answered(server: str, engine: ApiEngine, name: str) -> None:
    before = len(engine.prompts)
    for path in ("chat", "generate"):
        for stream in (False, True):
            refused = ask(server, path, model=name, stream=stream)
            assert refused.status_code == 404
            assert set(refused.json()) == {"error"} and f"{name!r} not found" in refused.json()["error"]
    assert ask(server, model=name, messages=[]).status_code == 404
    assert len(engine.prompts) == before


def test_another_models_name_is_the_official_clients_404(client: Client) -> None:
    for call in (lambda: client.chat("llama3.2", MESSAGES), lambda: client.show("llama3.2")):
        with pytest.raises(ResponseError, match="not found. Served here: mine, fake-135M") as caught:
            call()
        assert caught.value.status_code == 404


def test_without_a_prompt_the_model_is_loaded_and_nothing_runs(server: str, client: Client, engine: ApiEngine) -> None:
    before = len(engine.prompts)
    for response in (
        ask(server, messages=[]),
        ask(server, messages=None, stream=True),
        ask(server, "generate", prompt=""),
    ):
        answer = response.json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert client.generate(MODEL).done_reason == "load"
    assert len(engine.prompts) == before


def test_tags_lists_the_model_as_it_is_served(client: Client) -> None:
    models = client.list().models
    assert [model.model for model in models] == ["mine", MODEL]
    assert models[0].size == 270_000_000
    assert models[0].details is not None and models[0].details.family == "llama"
    assert models[0].digest is not None and len(models[0].digest) == 64
    assert models[0].modified_at is not None


def test_ps_lists_the_model_with_its_memory(client: Client) -> None:
    models = client.ps().models
    assert [model.name for model in models] == ["mine", MODEL]
    assert models[0].size == 270_000_000 + 4096 * 737_280
    assert (models[0].size_vram, models[0].context_length) == (0, 8192)


def test_show_tells_window_and_capabilities(server: str, client: Client) -> None:
    shown = client.show(MODEL)
    assert shown.modelinfo == {"general.architecture": "llama", "llama.context_length": 8192}
    assert shown.capabilities == ["completion", "tools"]
    assert httpx.post(f"{server}/api/show", json={"name": MODEL, "verbose": True}).status_code == 200
    missing = httpx.post(f"{server}/api/show", json={})
    assert missing.status_code == 400 and "model" in missing.json()["error"]


def test_version_is_ours(server: str) -> None:
    assert httpx.get(f"{server}/api/version").json() == {"version": __version__}


def test_a_body_is_read_whatever_its_content_type_as_curl_sends_it(server: str) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    content = json.dumps({"model": MODEL, "prompt": "Name a boat.", "stream": False})
    assert httpx.post(f"{server}/api/generate", content=content, headers=headers).json()["response"] == ANSWER


def test_a_form_of_another_site_is_refused_in_ollamas_shape(server: str) -> None:
    headers = {"Content-Type": "text/plain", "Origin": "https://evil.example"}
    refused = httpx.post(f"{server}/api/generate", content=json.dumps({"model": MODEL, "prompt": "x"}), headers=headers)
    assert refused.status_code == 403
    assert "another site" in refused.json()["error"]


def test_no_path_of_the_apis_is_taken_twice() -> None:
    part = Mock()
    routers = [api.router(part, part) for api in (openai_api, ollama_api, anthropic_api)]
    routers += [kv_api.router(part, part), chat_api.router(part, part, part, part, False)]
    taken = [(route.path, method) for router in routers for route in router.routes for method in route.methods]  # type: ignore[attr-defined]
    assert len(taken) == len(set(taken))


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_ends_the_answer_with_an_error(tmp_path: Path, stream: bool) -> None:
    engine = ApiEngine()
    with serving(tmp_path, engine) as server:
        engine.die_after = 2
        response = ask(server, stream=stream)
        last = lines_of(response)[-1]
        assert set(last) == {"error"} and "ended unexpectedly" in last["error"]
        assert response.status_code == (200 if stream else 503)
        assert ask(server).json()["message"]["content"] == ANSWER


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_a_client_that_goes_away_cancels_its_stream(tmp_path: Path, path: str) -> None:
    engine = ApiEngine()
    with serving(tmp_path, engine) as server:
        engine.hold = asyncio.Event()
        body = {"model": MODEL, "messages": MESSAGES} if path == "chat" else {"model": MODEL, "prompt": "Name a boat."}
        with httpx.stream("POST", f"{server}/api/{path}", json=body) as response:
            assert json.loads(next(response.iter_lines()))["done"] is False
        wait_until(lambda: engine.closed)
        assert engine.ended == 0


def test_a_client_that_does_not_wait_cancels_its_request(tmp_path: Path) -> None:
    engine = ApiEngine()
    with serving(tmp_path, engine) as server:
        engine.hold = asyncio.Event()
        body = {"model": MODEL, "messages": MESSAGES, "stream": False}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server}/api/chat", json=body, timeout=0.5)
        wait_until(lambda: engine.closed)
        assert engine.ended == 0


def test_where_there_is_a_key_it_is_needed_and_refused_in_ollamas_shape(tmp_path: Path) -> None:
    with serving(tmp_path, ApiEngine(), api_key="a key") as server:
        refused = ask(server)
        assert refused.status_code == 401
        assert set(refused.json()) == {"error"} and "API key" in refused.json()["error"]
        with closing(Client(server, headers={"Authorization": "Bearer a key"})) as client:
            assert client.chat(MODEL, MESSAGES).message.content == ANSWER


@pytest.mark.slow
def test_the_real_engine_answers_fills_the_context_and_drops_who_goes_away(
    tmp_path: Path, default_model_path: Path
) -> None:
    with serving_default_model(tmp_path, default_model_path) as server, closing(Client(server)) as client:
        options: dict[str, Any] = {"temperature": 0, "num_predict": 12}
        whole = client.chat("real", MESSAGES, options=options)
        pieces = list(client.chat("real", MESSAGES, options=options, stream=True))
        assert whole.message.content and whole.eval_count == 12
        assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
        counted = client.generate("real", "One, two, three,", raw=True, options=options | {"stop": ["five"]})
        assert (counted.response, counted.done_reason) == (" four, ", "stop")
        schema = {"type": "object", "properties": {"fish": {"type": "boolean"}}, "required": ["fish"],
                  "additionalProperties": False}  # fmt: skip
        formed = client.chat("real", MESSAGES, options={"num_predict": 60}, format=schema)
        assert list(json.loads(formed.message.content or "")) == ["fish"]
        filled = client.chat("real", MESSAGES, options={"num_ctx": 64, "num_predict": -2, "stop": []})
        assert (filled.prompt_eval_count or 0) + (filled.eval_count or 0) <= 64
        body: dict[str, Any] = {"model": "real", "messages": MESSAGES, "options": {"min_p": 0, "temperature": 2}}
        with httpx.stream("POST", f"{server}/api/chat", json=body) as response:
            next(response.iter_lines())
        wait_for_empty_pool(server)
