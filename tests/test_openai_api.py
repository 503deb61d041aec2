"""The OpenAI-compatible API as programs use it: the official client and plain HTTP, on the real server and model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

pytestmark = pytest.mark.slow
MESSAGES: Any = [{"role": "user", "content": "Name three colours of the sea."}]
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`localpaged serve` as a person starts it, on a free port that its own words tell."""
    folder = tmp_path_factory.mktemp("server")
    log = folder / "log"
    command = [sys.executable, "-m", "localpaged", "serve", "--port", "0", "--kv-cache-memory", "512M"]
    command += ["--served-model-name", "mine"]
    # The caches of what is slow to build are shared with the other tests; the conversations are not.
    home = Path(os.environ["LOCALPAGED_HOME"])
    (home / "cache").mkdir(parents=True, exist_ok=True)
    (folder / "cache").symlink_to(home / "cache")
    with log.open("wb") as out:
        environment = os.environ | {"LOCALPAGED_HOME": str(folder)}
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    deadline = time.monotonic() + 120
    while "is ready:" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    yield log.read_text().split("is ready:")[1].split()[0]
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, log.read_text()


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def wait_for_empty_pool(server: str) -> None:
    for _ in range(200):
        stats = httpx.get(f"{server}/api/kv").json()
        if stats["referenced"] == 0 and stats["running"] == 0:
            assert stats["consistent"]
            return
        time.sleep(0.05)
    raise AssertionError(f"blocks stay in use: {stats}")


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["mine", MODEL]


def test_several_choices_share_one_prompt_in_the_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, max_tokens=8, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_running_usage_counts_each_choice_in_its_chunks_and_all_at_the_end(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts: dict[int, list[int]] = {0: [], 1: []}
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, max_tokens=8, seed=1, stream=True, stream_options=options
    )
    for chunk in stream:
        assert chunk.usage is not None and chunk.usage.prompt_tokens > 0
        for choice in chunk.choices:
            counts[choice.index].append(chunk.usage.completion_tokens)
    for running in counts.values():
        assert running[0] == 0 and running == sorted(running) and 0 < running[-1] <= 8
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == counts[0][-1] + counts[1][-1]


def test_sixty_four_choices_share_one_prompt(client: OpenAI, server: str) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=64, max_tokens=3, seed=1)
    assert [choice.index for choice in answer.choices] == list(range(64))
    assert answer.usage is not None and answer.usage.completion_tokens <= 3 * 64
    wait_for_empty_pool(server)


def test_a_repeated_prompt_is_reported_as_cached(client: OpenAI) -> None:
    for _ in range(2):
        answer = client.chat.completions.create(model="mine", messages=MESSAGES, max_tokens=2)
    assert answer.model == "mine"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 16 * 16


def test_a_seed_repeats_and_a_stream_says_the_same(client: OpenAI) -> None:
    settings: Any = {"model": MODEL, "messages": MESSAGES, "n": 2, "seed": 7, "max_tokens": 12}
    whole = client.chat.completions.create(**settings)
    texts = ["", ""]
    reasons: list[Any] = [None, None]
    roles = set()
    usage = None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **settings):
        for choice in chunk.choices:
            roles.add((choice.index, choice.delta.role))
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert {(0, "assistant"), (1, "assistant")} <= roles
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_a_stream_ends_with_done_and_is_not_buffered(server: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{server}/v1/chat/completions", json=body) as response:
        assert response.headers["x-accel-buffering"] == "no"
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    first, last = (json.loads(line[6:])["choices"][0] for line in (lines[0], lines[-2]))
    assert first["delta"]["role"] == "assistant"
    assert last["finish_reason"] in ("stop", "length")


def test_logprobs_have_tokens_bytes_and_alternatives(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    text = b"".join(bytes(token.bytes or []) for token in logprobs.content).decode()
    assert text == answer.choices[0].message.content
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob


def test_completions_take_several_prompts_and_stop(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One, two,", "Red, green,"], n=2, max_tokens=12, temperature=0, stop=["."], logprobs=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert all("." not in choice.text for choice in answer.choices)
    assert answer.choices[0].logprobs is not None


def test_completions_take_token_ids(client: OpenAI) -> None:
    assert client.completions.create(model=MODEL, prompt=[504, 3575, 282, 4649, 314], max_tokens=1, temperature=0)


def test_beam_search_is_asked_for_as_in_vllm(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="One, two,", n=2, max_tokens=5, extra_body={"use_beam_search": True, "best_of": 4}
    )
    assert len(answer.choices) == 2


def test_another_models_name_is_an_error(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": "2"}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"unknown_field": 1}, "unknown_field"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "sea " * 9000}]}, "messages"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"store": True}, "store"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_a_400_that_names_it(server: str, body: dict[str, Any], param: str, stream: bool) -> None:
    answer = httpx.post(f"{server}/v1/chat/completions", json={"messages": MESSAGES, "stream": stream} | body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_a_prompt_that_is_too_long_says_both_numbers(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="window is 8,192") as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "sea " * 9000}])
    assert caught.value.code == "context_length_exceeded"


def test_fields_that_real_clients_send_are_accepted(server: str) -> None:
    body = {"messages": MESSAGES, "max_completion_tokens": 1, "user": "me", "metadata": {"a": "b"}, "store": False}
    body |= {"service_tier": "auto", "tools": [], "response_format": {"type": "text"}, "model": MODEL}
    assert httpx.post(f"{server}/v1/chat/completions", json=body).status_code == 200


def test_a_client_that_goes_away_cancels_its_stream(server: str) -> None:
    body = {"messages": MESSAGES, "n": 4, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server}/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    wait_for_empty_pool(server)


def test_a_client_that_does_not_wait_cancels_its_request(server: str) -> None:
    body = {"messages": MESSAGES, "n": 4, "max_tokens": 2000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server}/v1/chat/completions", json=body, timeout=1.0)
    wait_for_empty_pool(server)


def test_metrics_count_what_was_done(server: str) -> None:
    text = httpx.get(f"{server}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["localpaged_up"]) == 1
    assert float(values["localpaged_generated_tokens_total"]) > 0
    assert float(values["localpaged_time_to_first_token_seconds_count"]) > 0
    assert float(values["localpaged_kv_referenced"]) == 0
    # What the dashboard in docs/ draws is there, and each of its panels draws something.
    panels = json.loads((Path(__file__).parent.parent / "docs" / "grafana.json").read_text())["panels"]
    drawn = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(panels) >= 8 and all(panel["targets"] for panel in panels)
    names = {name.split("{")[0] for name in values}
    for expression in drawn:
        wanted = re.findall(r"localpaged_[a-z_]+", expression)
        assert wanted and set(wanted) <= names, expression


def test_a_foreign_host_name_is_refused(server: str) -> None:
    assert httpx.get(f"{server}/v1/models", headers={"Host": "evil.example"}).status_code in (400, 403, 421)


def test_health_names_the_model(server: str) -> None:
    assert httpx.get(f"{server}/health").json() == {"status": "ok", "model": MODEL}


def test_every_choice_follows_a_json_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["blue", "green"]}, "depth": {"type": "integer", "maximum": 9, "minimum": 1}},
        "required": ["colour", "depth"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "sea", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, response_format=form, max_tokens=80)
    for choice in answer.choices:
        value = json.loads(choice.message.content or "")
        assert value["colour"] in ("blue", "green") and 1 <= value["depth"] <= 9
        assert choice.finish_reason == "stop"
    extra = {"structured_outputs": {"regex": "[0-9]{4}"}}
    year = client.completions.create(model=MODEL, prompt="The year is", extra_body=extra, max_tokens=9)
    assert re.fullmatch("[0-9]{4}", year.choices[0].text)
