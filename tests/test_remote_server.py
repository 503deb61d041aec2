"""The whole server on another one: this project's own on a scripted engine, asked through every API of ours."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from api_server import ANSWER, MODEL, ApiEngine, listening, serving, wait_until
from openai_stub import Stub, end, refusal, stub_serving, usage, word

from localpaged.config import load_settings
from localpaged.errors import SettingError
from localpaged.server.metrics import MeteredRemote
from localpaged.server.remote_config import checked_url, remote_config
from localpaged.server.security import Access
from localpaged.server.serve import build_app
from localpaged.store.store import Store
from localpaged.terminal import fetch_status

HELLO = [{"role": "user", "content": "Hello"}]


@contextmanager
def in_front_of(remote: str, folder: Path, ready: bool = True, **settings: Any) -> Iterator[str]:
    """Our server on another one; yields its address."""
    folder.mkdir(exist_ok=True)
    loaded = load_settings(engine="openai", base_url=remote, **settings)
    config = remote_config(loaded)
    assert config is not None
    engine = MeteredRemote(config, away_every_s=0.05)
    app = build_app(loaded, None, Store(folder / "chats.db"), Access(), engine, None)
    with listening(app) as address:
        if ready:
            wait_until(lambda: httpx.get(f"{address}/health").status_code == 200)
        yield address


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[str, ApiEngine]]:
    """Our server in front of our server; and the engine behind that."""
    engine = ApiEngine(token_s=0.002)
    folder = tmp_path / "remote"
    folder.mkdir()
    with serving(folder, engine) as remote, in_front_of(f"{remote}/v1", tmp_path / "front") as address:
        yield address, engine


def ask_page(address: str, text: str, **sampling: Any) -> tuple[int, dict[str, Any]]:
    """A message of the page to a new conversation: its id and the job's."""
    conversation = httpx.post(f"{address}/api/conversations", json={}).json()["conversation"]["id"]
    return conversation, send(address, conversation, text, None, **sampling)


def send(address: str, conversation: int, text: str, parent: int | None, **sampling: Any) -> dict[str, Any]:
    body = {"parent": parent, "text": text, "sampling": {"max_tokens": 64, **sampling}}
    return httpx.post(f"{address}/api/conversations/{conversation}/messages", json=body).json()


def events_of(address: str, job: str) -> list[dict[str, Any]]:
    lines = httpx.get(f"{address}/api/jobs/{job}/events?cursor=0", timeout=20).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def view(address: str, conversation: int) -> dict[str, Any]:
    return httpx.get(f"{address}/api/conversations/{conversation}").json()


def test_the_pages_candidates_conversation_and_choice_work_on_our_own_server(own: tuple[str, ApiEngine]) -> None:
    address, engine = own
    conversation, started = ask_page(address, "Hello", n=4)
    assert events_of(address, started["job"])[-1] == {"type": "done", "error": None}
    answers = view(address, conversation)["open_candidates"]
    assert [message["text"][:8] for message in answers] == [f"Answer {letter}" for letter in "ABCD"]
    assert {(message["state"], message["finish_reason"], message["model"]) for message in answers} == {
        ("complete", "stop", MODEL)
    }
    assert [params.n for params in engine.params] == [4]
    timings = answers[0]["timings"]
    # With the token that ends it, which the scripted engine leaves out of its sum.
    assert timings["num_tokens"] == len(ANSWER) + 1 and timings["tokens_per_s"] > 0 and timings["ttft_s"] > 0
    assert timings["num_cached_tokens"] == 0 and timings["num_computed_tokens"] > 0
    httpx.post(f"{address}/api/messages/{answers[1]['id']}/choose")
    started = send(address, conversation, "And then?", answers[1]["id"], n=1)
    events_of(address, started["job"])
    last = view(address, conversation)["turns"][-1]["message"]
    assert last["timings"]["num_tokens"] == len(ANSWER) and last["timings"]["tokens_per_s"] > 0
    assert "Answer B: it is **paged**." in engine.tokenizer.decode(engine.prompts[-1])


def test_what_is_absent_is_said_to_be(own: tuple[str, ApiEngine]) -> None:
    address, _ = own
    state = httpx.get(f"{address}/api/state").json()
    assert state["features"] == {"kv": False, "token_count": False, "continue_answer": False}
    assert state["model"]["name"] == MODEL and state["model"]["max_model_len"] == 8192
    for path in ("", "/conversations", "/estimate?tokens=4"):
        answer = httpx.get(f"{address}/api/kv{path}")
        assert answer.status_code == 404 and "keeps its KV itself" in answer.json()["error"]["message"]
    counted = httpx.post(f"{address}/api/count", json={"parent": None, "text": "abc"}).json()
    assert counted == {"history": None, "draft": None, "window": 8192}
    body = {"model": MODEL, "messages": HELLO}
    assert httpx.post(f"{address}/v1/messages/count_tokens", json=body).status_code == 404
    begun = {**body, "max_tokens": 5, "messages": [*HELLO, {"role": "assistant", "content": "It is"}]}
    assert "has begun" in httpx.post(f"{address}/v1/messages", json=begun).json()["error"]["message"]
    conversation, started = ask_page(address, "Hello", n=1, max_tokens=3)
    events_of(address, started["job"])
    cut = view(address, conversation)["turns"][-1]["message"]
    assert cut["finish_reason"] == "length"
    refused = httpx.post(f"{address}/api/messages/{cut['id']}/continue", json={"sampling": {}})
    assert refused.status_code == 404 and "cannot go on" in refused.json()["error"]["message"]
    listed = httpx.get(f"{address}/api/conversations").json()["conversations"]
    assert [one["kv"] for one in listed] == [None]


def test_the_official_client_gets_candidates_streams_and_usage(own: tuple[str, ApiEngine]) -> None:
    address, engine = own
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, n=3, max_tokens=64)  # type: ignore[arg-type]
        assert [choice.message.content for choice in answer.choices] == [ANSWER.replace("A:", f"{c}:") for c in "ABC"]
        assert answer.usage is not None and answer.usage.completion_tokens == 3 * len(ANSWER)
        text = ""
        for chunk in client.chat.completions.create(
            model=MODEL,
            messages=HELLO,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=64,
        ):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        assert text == ANSWER
        assert chunk.usage is not None and chunk.usage.prompt_tokens > 0
        assert client.completions.create(model=MODEL, prompt="Once", max_tokens=64).choices[0].text == ANSWER
        with pytest.raises(openai.BadRequestError, match="temperature is 200"):
            client.chat.completions.create(model=MODEL, messages=HELLO, temperature=200)  # type: ignore[arg-type]
    assert engine.tokenizer.decode(engine.prompts[-1]) == "<|im_start|>Once"


def test_ollamas_and_anthropics_apis_answer_too(own: tuple[str, ApiEngine]) -> None:
    address, engine = own
    body = {"model": MODEL, "messages": HELLO, "stream": False}
    told = httpx.post(f"{address}/api/chat", json=body).json()
    assert told["message"]["content"] == ANSWER and told["eval_count"] == len(ANSWER)
    assert engine.params[-1].top_k == 0
    answer = httpx.post(f"{address}/v1/messages", json={"model": MODEL, "messages": HELLO, "max_tokens": 64}).json()
    assert answer["content"][0]["text"] == ANSWER and answer["usage"]["output_tokens"] == len(ANSWER)
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as client:
        with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=64) as stream:  # type: ignore[arg-type]
            message = stream.get_final_message()
        assert message.content[0].text == ANSWER and message.usage.output_tokens == len(ANSWER)  # type: ignore[union-attr]
        assert message.usage.input_tokens > 0
    (model,) = httpx.get(f"{address}/api/tags").json()["models"]
    assert model["name"] == MODEL and "size" not in model


def test_candidates_that_are_not_counted_one_by_one_have_no_tokens_and_no_speed(tmp_path: Path) -> None:
    with stub_serving() as stub, in_front_of(stub.address, tmp_path) as address:
        stub.answer = lambda body: [word("a", 0), word("b", 1), 0.01, end("stop", 0), end("stop", 1), usage(5, 2)]
        conversation, started = ask_page(address, "Hello", n=2)
        events_of(address, started["job"])
        for message in view(address, conversation)["open_candidates"]:
            timings = message["timings"]
            assert timings["num_tokens"] is None and timings["tokens_per_s"] is None and timings["ttft_s"] > 0


def test_a_server_without_n_gets_a_request_for_each_candidate_of_the_page(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return refusal(400, "n is not supported") if body.get("n") else [word("Hi"), end(), usage(5, 1), "[DONE]"]

    with stub_serving() as stub:
        stub.answer = answer
        with in_front_of(stub.address, tmp_path) as address:
            conversation, started = ask_page(address, "Hello", n=3, seed=1)
            events_of(address, started["job"])
            answers = view(address, conversation)["open_candidates"]
            assert [(message["text"], message["timings"]["num_tokens"]) for message in answers] == [("Hi", 1)] * 3
            assert len({body["seed"] for body in stub.requests[1:]}) == 3


def test_an_answer_goes_on_where_the_server_is_known_to_do_that(tmp_path: Path) -> None:
    stub = Stub()
    stub.models[0]["owned_by"] = "vllm"
    with stub_serving(stub), in_front_of(stub.address, tmp_path) as address:
        stub.answer = lambda body: [word("One two"), end("length"), usage(5, 2), "[DONE]"]
        conversation, started = ask_page(address, "Hello", n=1)
        events_of(address, started["job"])
        cut = view(address, conversation)["turns"][-1]["message"]
        stub.answer = lambda body: [word(" three"), end(), usage(7, 1), "[DONE]"]
        job = httpx.post(f"{address}/api/messages/{cut['id']}/continue", json={}).json()["job"]
        events_of(address, job)
        whole = view(address, conversation)["turns"][-1]["message"]
        assert (whole["text"], whole["timings"]["num_tokens"]) == ("One two three", 3)
        body = stub.requests[-1]
        assert body["messages"][-1] == {"role": "assistant", "content": "One two"}
        assert body["continue_final_message"] is True and body["add_generation_prompt"] is False


def test_stopping_reaches_the_engine_behind_the_other_server(own: tuple[str, ApiEngine]) -> None:
    address, engine = own
    engine.answer = lambda prompt, index: "words " * 5000
    conversation, started = ask_page(address, "Hello", n=2, max_tokens=None)
    wait_until(lambda: engine.prompts and all(m["text"] for m in view(address, conversation)["open_candidates"]))
    httpx.post(f"{address}/api/jobs/{started['job']}/stop", json={})
    assert events_of(address, started["job"])[-1]["error"] is None
    wait_until(lambda: engine.closed == 1)
    assert engine.ended == 0
    answers = view(address, conversation)["open_candidates"]
    assert {message["finish_reason"] for message in answers} == {"cancelled"} and answers[0]["text"]


def test_a_client_that_goes_away_cancels_at_the_engine_behind_the_other_server(own: tuple[str, ApiEngine]) -> None:
    address, engine = own
    engine.answer = lambda prompt, index: "words " * 5000
    body = {"messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body) as response:
        next(response.iter_bytes())
    wait_until(lambda: engine.closed == 1)
    assert engine.ended == 0


def test_a_server_that_is_away_is_said_and_found_when_it_comes(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with in_front_of(f"http://127.0.0.1:{port}", tmp_path, ready=False) as address:
        wait_until(lambda: httpx.get(f"{address}/health").json()["status"] == "dead")
        health = httpx.get(f"{address}/health")
        assert health.status_code == 503 and "cannot be reached" in health.json()["detail"]
        state = httpx.get(f"{address}/api/state").json()
        assert state["engine"] == "dead" and f"127.0.0.1:{port}/v1" in state["error"]
        assert httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO}).status_code == 503
        conversation, started = ask_page(address, "Hello", n=2)
        assert "cannot be reached" in events_of(address, started["job"])[-1]["error"]["message"]
        assert "localpaged_up 0.0" in httpx.get(f"{address}/metrics").text
        with stub_serving(port=port):
            wait_until(lambda: httpx.get(f"{address}/health").status_code == 200)
            answer = httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO}).json()
            assert answer["choices"][0]["message"]["content"] == "Hi there"
            metrics = httpx.get(f"{address}/metrics").text
            assert "localpaged_up 1.0" in metrics and "localpaged_generated_tokens_total 2.0" in metrics
            assert "localpaged_time_to_first_token_seconds_count 1.0" in metrics
        assert httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO}).status_code == 503
        wait_until(lambda: httpx.get(f"{address}/health").status_code == 503)


def test_a_server_that_dies_in_the_middle_leaves_what_came(tmp_path: Path) -> None:
    with stub_serving() as stub:
        stub.answer = lambda body: [word("Half a sen"), 0.2, RuntimeError("it dies")]
        with in_front_of(stub.address, tmp_path) as address:
            conversation, started = ask_page(address, "Hello", n=1)
            assert events_of(address, started["job"])[-1]["error"]["code"] == "remote"
            message = view(address, conversation)["turns"][-1]["message"]
            assert (message["text"], message["state"]) == ("Half a sen", "error")
            assert "broke off" in message["error"]


@pytest.mark.parametrize(
    ("status", "ours"), [(401, 502), (404, 502), (429, 429), (500, 502), (400, 400)], ids=lambda status: str(status)
)
def test_refusals_have_a_status_that_clients_can_act_on(tmp_path: Path, status: int, ours: int) -> None:
    with stub_serving() as stub:
        stub.answer = lambda body: refusal(status, "why")
        with in_front_of(stub.address, tmp_path) as address:
            for streams in (False, True):
                body = {"messages": HELLO, "stream": streams}
                assert httpx.post(f"{address}/v1/chat/completions", json=body).status_code == ours


def test_the_model_is_the_one_that_was_named_and_another_is_not_served(tmp_path: Path) -> None:
    with stub_serving() as stub, in_front_of(stub.address, tmp_path, model="stub-2") as address:
        assert httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO}).status_code == 200
        assert stub.requests[-1]["model"] == "stub-2"
    with stub_serving() as stub, in_front_of(stub.address, tmp_path, ready=False, model="other") as address:
        wait_until(lambda: httpx.get(f"{address}/health").json()["status"] == "dead")
        detail = httpx.get(f"{address}/health").json()["detail"]
        assert "does not serve 'other'" in detail and "stub-1, stub-2" in detail


def test_the_key_of_the_other_server_is_sent_to_it_and_shown_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text("very-secret\n")
    with stub_serving() as stub, in_front_of(stub.address, tmp_path, remote_api_key_file=file) as address:
        stub.answer = lambda body: refusal(401, "Incorrect API key provided: very-secret")
        told = httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO}).text
        state = httpx.get(f"{address}/api/state").text
        assert {headers["authorization"] for headers in stub.headers} == {"Bearer very-secret"}
        assert "very-secret" not in told + state + caplog.text + httpx.get(f"{address}/metrics").text
        assert "very-secret" not in repr(remote_config(load_settings(engine="openai", base_url=stub.address)))


def test_ps_shows_the_model_of_another_server(tmp_path: Path) -> None:
    with stub_serving() as stub, in_front_of(stub.address, tmp_path) as address:
        status = fetch_status(load_settings(port=int(address.rpartition(":")[2])))
        assert status["model"] == "stub-1" and status["conversations"] == [] and "keeps its KV itself" in status["kv"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"base_url": "http://127.0.0.1:8000"}, "--engine openai"),
        ({"engine": "openai"}, "add --base-url"),
        ({"engine": "openai", "base_url": "ftp://127.0.0.1"}, "http:// or https://"),
        ({"engine": "openai", "base_url": "127.0.0.1:8000"}, "http:// or https://"),
        ({"engine": "openai", "base_url": "me:secret@host/v1"}, "http:// or https://"),
        ({"engine": "openai", "base_url": "http://me:secret@host/v1"}, "--remote-api-key-file"),
        ({"engine": "openai", "base_url": "http://host:x"}, "no address that can be read"),
        ({"engine": "openai", "base_url": "http://host", "block_size": 32}, "decides on --block-size"),
        ({"engine": "openai", "base_url": "http://[::1"}, "no address that can be read"),
        ({"engine": "openai", "base_url": "http://host", "remote_api_key": "sécret"}, "no header carries"),
        ({"engine": "openai", "base_url": "http://host/v1?key=secret"}, "query"),
        ({"engine": "remote"}, "--engine"),
        ({"engine": "openai", "base_url": "http://host", "remote_api_key_file": "/none"}, "cannot be read"),
    ],
)
def test_settings_that_do_not_fit_are_said_without_secrets(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError) as caught:
        remote_config(load_settings(**flags))
    assert words in str(caught.value) and "secret" not in str(caught.value)


def test_an_address_without_a_path_gets_openais() -> None:
    assert checked_url("http://host:8000") == checked_url("http://host:8000/v1/") == "http://host:8000/v1"
    assert checked_url("https://host/llm/openai") == "https://host/llm/openai"


@pytest.mark.slow
def test_the_command_serves_another_servers_model_without_a_model_or_torch_here(tmp_path: Path) -> None:
    program = "import sys; from localpaged.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    with stub_serving() as stub:
        flags = ["serve", "--engine", "openai", "--base-url", stub.address, "--port", "0"]
        command = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, *flags],
            env={"PATH": "", "LOCALPAGED_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        with command as process:
            assert process.stdout is not None
            watchdog = threading.Timer(60, process.kill)
            watchdog.start()
            seen = ""
            while "Stop it with" not in seen:
                line = process.stdout.readline()
                assert line, f"it ended: {seen}"
                seen += line
            process.terminate()
            rest = process.stdout.read()
            watchdog.cancel()
        assert f"stub-1 on {stub.address}" in seen and "localpaged is ready" in seen
        assert rest.strip().endswith("False") and process.returncode == 0
