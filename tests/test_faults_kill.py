"""Processes that are killed in every phase: what was confirmed is there, what ran is told, the next request works."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import serving_default_model, wait_until

sys.path.insert(0, str(Path(__file__).parent / "e2e"))
from server_process import scripted  # noqa: E402

LONG = "The lamp turns once in twelve seconds. " * 200


class Asked:
    """A request on a thread of its own; what came of it."""

    def __init__(self, url: str, method: str, path: str, body: Any) -> None:
        self.said = ""
        self.status = 0
        self._asked = (method, url + path, body)
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        method, url, body = self._asked
        try:
            with httpx.stream(method, url, json=body, timeout=120) as response:
                self.status = response.status_code
                for piece in response.iter_text():
                    self.said += piece
        except httpx.TransportError as error:
            self.said += f"<{error!r}>"

    def wait(self) -> "Asked":
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self

    @property
    def events(self) -> list[Any]:
        return [json.loads(line[6:]) for line in self.said.splitlines() if line.startswith("data: {")]


def new_conversation(url: str) -> int:
    return int(httpx.post(f"{url}/api/conversations", json={}).json()["conversation"]["id"])


def send(url: str, conversation: int, text: str, parent: int | None = None, **sampling: Any) -> Any:
    body = {"parent": parent, "text": text, "sampling": sampling}
    answer = httpx.post(f"{url}/api/conversations/{conversation}/messages", json=body, timeout=30)
    assert answer.status_code == 202, answer.text
    return answer.json()


def view(url: str, conversation: int) -> Any:
    return httpx.get(f"{url}/api/conversations/{conversation}", timeout=30).json()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[str]:
    with serving_default_model(tmp_path_factory.mktemp("kill"), default_model_path) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_killing_the_engine_in_any_phase_tells_everyone_and_the_next_request_works(server: str, phase: str) -> None:
    text = f"In phase {phase}: " + (LONG if phase == "prefill" else "tell a long story.")
    pid = httpx.get(f"{server}/api/kv").json()["pid"]
    if phase == "queued":
        # It takes nothing in, and then is gone.
        os.kill(pid, signal.SIGSTOP)
    conversation = new_conversation(server)
    job = send(server, conversation, text, n=3, max_tokens=400)["job"]
    watcher = Asked(server, "GET", f"/api/jobs/{job}/events", None)
    body = {"model": "real", "messages": [{"role": "user", "content": text + "!"}], "n": 2, "max_tokens": 400}
    streamed = Asked(server, "POST", "/v1/chat/completions", body | {"stream": True, "ignore_eos": True})
    whole = Asked(server, "POST", "/v1/chat/completions", body | {"ignore_eos": True})
    mark = {"queued": '"snapshot"', "prefill": '"type":"prefill"', "decode": '"type":"tokens"'}[phase]
    wait_until(lambda: mark in watcher.said, 60)
    if phase == "decode":
        wait_until(lambda: streamed.said.count('"content"') > 4, 60)
    os.kill(pid, signal.SIGKILL)
    done = watcher.wait().events[-1]
    assert done["type"] == "done" and done["error"]["code"] == "engine_dead"
    shown = view(server, conversation)
    assert shown["turns"][0]["message"]["text"] == text
    answers = shown["open_candidates"] or [shown["turns"][-1]["message"]]
    assert {answer["state"] for answer in answers} == {"error"}
    told = "".join(
        part["text"]
        for event in watcher.events
        for part in event.get("candidates", [])
        if part["i"] == 0 and event["type"] in ("tokens", "snapshot")
    )
    # Everything that was shown is kept.
    assert answers[0]["text"] == told and (phase != "decode" or told)
    assert whole.wait().status == 503 and "engine" in whole.said
    if streamed.wait().status == 200:
        assert streamed.events[-1]["error"]["code"] == "engine_dead" and "[DONE]" not in streamed.said
    else:
        # It waited behind the long prompt.
        assert streamed.status == 503 and phase != "decode"
    wait_until(lambda: httpx.get(f"{server}/health").status_code == 503)
    short = body | {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "n": 1}
    again = httpx.post(f"{server}/v1/chat/completions", json=short, timeout=120)
    assert again.status_code == 200
    assert httpx.get(f"{server}/health").status_code == 200
    stats = httpx.get(f"{server}/api/kv").json()
    assert stats["pid"] != pid and stats["consistent"] and stats["running"] == stats["waiting"] == 0


def test_killing_the_server_in_any_phase_keeps_what_was_confirmed(tmp_path: Path) -> None:
    process = scripted(tmp_path, FAKE_PAGE="0", FAKE_TOKEN_S="0.004", FAKE_LOAD_S="600")
    url = process.url
    try:
        # While the model is loaded.
        process.start(until=503)
        conversation = new_conversation(url)
        asked = send(url, conversation, "Before the model was there", n=2)
        process.stop(signal.SIGKILL)
        del process._environment["FAKE_LOAD_S"]
        process.start()
        first = view(url, conversation)
        assert first["job"] is None and first["turns"][0]["message"]["id"] == asked["user"]
        assert "running" not in states(first)
        # With an answer that is complete, chosen, and gone on from.
        again = {"sampling": {"n": 2, "max_tokens": 40}}
        job = httpx.post(f"{url}/api/messages/{asked['user']}/regenerate", json=again).json()["job"]
        Asked(url, "GET", f"/api/jobs/{job}/events", None).wait()
        chosen = [one for one in view(url, conversation)["open_candidates"] if one["state"] == "complete"][-1]
        httpx.post(f"{url}/api/messages/{chosen['id']}/choose", json={}).raise_for_status()
        job = send(url, conversation, "something slow", chosen["id"], n=1, max_tokens=None)["job"]
        watcher = Asked(url, "GET", f"/api/jobs/{job}/events", None)
        stream = Asked(
            url, "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "slow"}]} | STREAM
        )
        # Stored once a second: kill it when some of it was.
        wait_until(lambda: stored(url, conversation), 30)
        saved = stored(url, conversation)
        process.stop(signal.SIGKILL)
        assert "RemoteProtocolError" in watcher.wait().said and "[DONE]" not in stream.wait().said
        process.start()
        last = view(url, conversation)
        kept = [turn["message"] for turn in last["turns"]]
        assert [message["text"] for message in kept[:3]] == [
            "Before the model was there",
            chosen["text"],
            "something slow",
        ]
        assert kept[3]["state"] == "interrupted" and kept[3]["text"].startswith(saved)
        assert httpx.get(f"{url}/health").status_code == 200
    finally:
        process.stop(signal.SIGKILL)


STREAM: Any = {"stream": True}


def stored(url: str, conversation: int) -> str:
    """The text of the answer that is being written, as the database has it."""
    last = view(url, conversation)["turns"][-1]["message"]
    return str(last["text"]) if last["role"] == "assistant" else ""


def states(shown: Any) -> set[str]:
    return {message["state"] for message in [*shown["open_candidates"], *(one["message"] for one in shown["turns"])]}
