"""The chat page's HTTP API, on a scripted engine."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, FakeTokenizer
from starlette.testclient import TestClient

from localpaged.server.app import create_app
from localpaged.store.store import Store

N4 = {"n": 4, "max_tokens": 64}


@contextmanager
def client_on(folder: Path, engine: FakeEngine | None = None) -> Iterator[TestClient]:
    app = create_app(engine or FakeEngine(), Store(folder / "chats.db"), FakeTokenizer)
    with TestClient(app, base_url="http://127.0.0.1:7860") as client:
        yield client


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with client_on(tmp_path) as client:
        wait_for_model(client)
        yield client


def wait_for_model(client: TestClient) -> None:
    deadline = time.monotonic() + 5
    while client.get("/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def events_of(client: TestClient, job: str, **options: Any) -> list[tuple[int, dict[str, Any]]]:
    """Follow a job to its end: (cursor, event)."""
    text = client.get(f"/api/jobs/{job}/events", **options).text
    found = []
    for chunk in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in chunk.splitlines() if ": " in line)
        if "data" in lines:
            found.append((int(lines["id"]), json.loads(lines["data"])))
    return found


def ask(client: TestClient, conversation: int, text: str, parent: int | None = None, **sampling: Any) -> Any:
    body = {"parent": parent, "text": text, "sampling": N4 | sampling}
    started = client.post(f"/api/conversations/{conversation}/messages", json=body)
    assert started.status_code == 202, started.text
    events_of(client, started.json()["job"])
    return client.get(f"/api/conversations/{conversation}").json()


def new(client: TestClient, **fields: Any) -> int:
    return int(client.post("/api/conversations", json=fields).json()["conversation"]["id"])


def test_ask_choose_and_go_on(client: TestClient) -> None:
    conversation = new(client, system_prompt="Be brief.")
    view = ask(client, conversation, "What is paging?")
    assert [message["text"][:8] for message in view["open_candidates"]] == [f"Answer {letter}" for letter in "ABCD"]
    chosen = view["open_candidates"][2]["id"]
    view = client.post(f"/api/messages/{chosen}/choose").json()
    assert view["turns"][-1]["message"]["id"] == chosen and len(view["turns"][-1]["siblings"]) == 4
    view = ask(client, conversation, "More", parent=chosen, n=1)
    assert [turn["message"]["role"] for turn in view["turns"]] == ["user", "assistant"] * 2
    last = view["turns"][-1]["message"]
    assert last["timings"]["num_cached_tokens"] > 0 and last["sampling"]["seed"] is not None
    assert view["conversation"]["title"] == "What is paging?"
    assert view["job"] is None


def test_the_event_stream_goes_on_from_the_last_event_that_arrived(client: TestClient) -> None:
    conversation = new(client)
    body = {"parent": None, "text": "Hi", "sampling": N4}
    job = client.post(f"/api/conversations/{conversation}/messages", json=body).json()["job"]
    whole = events_of(client, job, params={"cursor": 0})
    assert whole[-1][1]["type"] == "done"
    assert events_of(client, job, headers={"Last-Event-ID": str(whole[1][0])}) == whole[2:]
    over = client.get(f"/api/jobs/{job}/events", headers={"Last-Event-ID": str(whole[-1][0])})
    assert over.status_code == 204
    assert client.get("/api/jobs/unknown/events").status_code == 204


def test_the_event_stream_is_not_buffered_or_cached(client: TestClient) -> None:
    conversation = new(client)
    body = {"parent": None, "text": "Hi", "sampling": N4}
    job = client.post(f"/api/conversations/{conversation}/messages", json=body).json()["job"]
    response = client.get(f"/api/jobs/{job}/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["cache-control"] == "no-store"


def test_a_busy_conversation_answers_409_and_says_what_runs(tmp_path: Path) -> None:
    with client_on(tmp_path, FakeEngine(token_s=0.05)) as client:
        conversation = new(client)
        body = {"parent": None, "text": "Hi", "sampling": N4}
        job = client.post(f"/api/conversations/{conversation}/messages", json=body).json()["job"]
        refused = client.post(f"/api/conversations/{conversation}/messages", json=body)
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "conversation_busy"
        assert client.get(f"/api/conversations/{conversation}").json()["job"]["id"] == job
        assert client.get("/api/conversations").json()["conversations"][0]["running"] is True
        assert client.post(f"/api/jobs/{job}/stop", json={"candidates": [0]}).status_code == 200
        assert client.post(f"/api/jobs/{job}/stop", json={}).status_code == 200
        assert events_of(client, job)[-1][1]["type"] in ("done", "snapshot")


def test_choosing_while_answers_are_written_stops_the_others_only(tmp_path: Path) -> None:
    with client_on(tmp_path, FakeEngine(token_s=0.02)) as client:
        conversation = new(client)
        body = {"parent": None, "text": "Hi", "sampling": N4}
        job = client.post(f"/api/conversations/{conversation}/messages", json=body).json()["job"]
        chosen = client.get(f"/api/conversations/{conversation}").json()["open_candidates"][1]["id"]
        assert client.post(f"/api/messages/{chosen}/choose").status_code == 200
        events_of(client, job)
        view = client.get(f"/api/conversations/{conversation}").json()
        assert view["turns"][-1]["message"]["id"] == chosen
        assert view["turns"][-1]["message"]["finish_reason"] == "stop"
        user = view["turns"][0]["message"]["id"]
        others = client.post(f"/api/messages/{user}/reopen").json()["open_candidates"]
        assert [message["finish_reason"] for message in others] == ["cancelled", "stop", *["cancelled"] * 2]


def test_editing_and_regenerating_make_branches(client: TestClient) -> None:
    conversation = new(client)
    view = ask(client, conversation, "Helo", n=1)
    view = ask(client, conversation, "Hello", parent=None, n=1)
    assert len(view["turns"][0]["siblings"]) == 2 and view["turns"][0]["message"]["text"] == "Hello"
    user = view["turns"][0]["message"]["id"]
    started = client.post(f"/api/messages/{user}/regenerate", json={"sampling": N4}).json()
    events_of(client, started["job"])
    view = client.get(f"/api/conversations/{conversation}").json()
    assert len(view["open_candidates"]) == 5
    first = view["turns"][0]["siblings"][0]
    view = client.post(f"/api/messages/{first}/choose").json()
    assert [turn["message"]["text"] for turn in view["turns"]][0] == "Helo"
    ids = [view["turns"][0]["siblings"][1]]
    view = client.post("/api/messages/delete", json={"ids": ids}).json()
    assert view["turns"][0]["siblings"] == [first]


def test_conversations_are_renamed_pinned_searched_deleted_and_restored(client: TestClient) -> None:
    conversation = new(client, title="One")
    ask(client, conversation, "Where is the lighthouse?", n=1)
    change = {"title": "Two", "pinned": True, "settings": {"n": 4}, "system_prompt": "Short."}
    assert client.patch(f"/api/conversations/{conversation}", json=change).json()["title"] == "Two"
    (hit,) = client.get("/api/conversations", params={"query": "light"}).json()["conversations"]
    assert hit["snippet"] == "Where is the \x02lighthouse\x03?" and hit["settings"] == {"n": 4}
    assert client.delete(f"/api/conversations/{conversation}").status_code == 200
    assert client.get("/api/conversations").json() == {"conversations": [], "total": 0}
    assert client.get(f"/api/conversations/{conversation}").status_code == 404
    restored = client.post(f"/api/conversations/{conversation}/restore").json()
    assert restored["conversation"]["system_prompt"] == "Short." and len(restored["turns"]) == 2


def test_an_archived_conversation_is_not_pinned_and_comes_back(client: TestClient) -> None:
    conversation = new(client, title="One")
    client.patch(f"/api/conversations/{conversation}", json={"pinned": True})
    changed = client.patch(f"/api/conversations/{conversation}", json={"archived": True}).json()
    assert changed["archived"] and not changed["pinned"]
    (listed,) = client.get("/api/conversations").json()["conversations"]
    assert listed["archived"]
    assert not client.patch(f"/api/conversations/{conversation}", json={"archived": False}).json()["archived"]


def test_an_empty_title_brings_the_automatic_one_back(client: TestClient) -> None:
    conversation = new(client)
    assert client.patch(f"/api/conversations/{conversation}", json={"title": ""}).json()["title"] == ""
    ask(client, conversation, "Where is the lighthouse?", n=1)
    client.patch(f"/api/conversations/{conversation}", json={"title": "Mine"})
    changed = client.patch(f"/api/conversations/{conversation}", json={"title": "  "}).json()
    assert changed["title"] == "Where is the lighthouse?"


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    with client_on(tmp_path) as client:
        conversation = new(client)
        before = ask(client, conversation, "Hi")
    with client_on(tmp_path) as client:
        assert client.get(f"/api/conversations/{conversation}").json() == before


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"n": 0}, "sampling.n"),
        ({"n": 1000}, "sampling.n"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temprature": 1}, "sampling.temprature: Extra inputs"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_stored(
    client: TestClient, sampling: dict[str, Any], says: str
) -> None:
    conversation = new(client)
    body = {"parent": None, "text": "Hi", "sampling": sampling}
    refused = client.post(f"/api/conversations/{conversation}/messages", json=body)
    assert refused.status_code == 400
    assert says in refused.json()["error"]["message"]
    assert client.get(f"/api/conversations/{conversation}").json()["turns"] == []


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/api/conversations/99", None),
        ("PATCH", "/api/conversations/99", {"title": "x"}),
        ("DELETE", "/api/conversations/99", None),
        ("POST", "/api/conversations/99/messages", {"parent": None, "text": "Hi"}),
        ("POST", "/api/messages/99/choose", None),
        ("POST", "/api/messages/99/regenerate", {}),
        ("POST", "/api/messages/99/continue", {}),
        ("POST", "/api/messages/delete", {"ids": [99]}),
    ],
)
def test_what_is_not_there_answers_404(client: TestClient, method: str, path: str, body: Any) -> None:
    response = client.request(method, path, json=body)
    assert response.status_code == 404
    assert "There is no" in response.json()["error"]["message"]


def test_the_window_is_counted_exactly(client: TestClient) -> None:
    conversation = new(client)
    view = ask(client, conversation, "Hi", n=1)
    answer = view["turns"][-1]["message"]
    draft = {"conversation": conversation, "parent": answer["id"], "text": "More"}
    counted = client.post("/api/count", json=draft).json()
    after = ask(client, conversation, "More", parent=answer["id"], n=1)
    timings = after["turns"][-1]["message"]["timings"]
    assert counted["history"] == sum(turn["message"]["num_token_ids"] for turn in view["turns"])
    assert counted["history"] + counted["draft"] == (timings["num_cached_tokens"] + timings["num_computed_tokens"])
    assert counted["window"] == 8192
    fresh = client.post("/api/count", json={"text": "Hi", "system_prompt": "Be brief."}).json()
    assert fresh["history"] == 0 and fresh["draft"] == 40


def test_health_says_loading_then_ok_then_dead(tmp_path: Path) -> None:
    engine = FakeEngine(load_s=0.2)
    with client_on(tmp_path, engine) as client:
        loading = client.get("/health")
        assert (loading.status_code, loading.json()) == (503, {"status": "loading"})
        assert client.get("/api/kv").status_code == 503
        wait_for_model(client)
        assert client.get("/health").json() == {"status": "ok", "model": "fake-135M"}
        pool = client.get("/api/kv").json()
        assert pool["num_blocks"] == 4096 and pool["conversations"] == []
        assert "conversations" not in client.get("/api/kv?conversations=false").json()
        state = client.get("/api/state").json()
        assert state["engine"] == "ready" and state["model"]["max_model_len"] == 8192
        engine.state = "dead"
        dead = client.get("/health")
        assert dead.status_code == 503 and dead.json()["status"] == "dead" and dead.json()["detail"]
