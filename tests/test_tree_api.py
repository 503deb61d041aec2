"""Trees, branches, copies and the search over HTTP, on a scripted engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from test_chat_api import ask, client_on, new, wait_for_model


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with client_on(tmp_path) as client:
        wait_for_model(client)
        yield client


@pytest.fixture
def chat(client: TestClient) -> dict[str, Any]:
    """Two questions: the first with two answers, of which the second is chosen, the second with one."""
    conversation = new(client, title="Boats", system_prompt="Be brief.")
    view = ask(client, conversation, "Name a boat.", n=2)
    chosen = view["open_candidates"][1]["id"]
    client.post(f"/api/messages/{chosen}/choose")
    return dict(ask(client, conversation, "And a lighthouse", parent=chosen, n=1))


def test_the_tree_has_every_message_with_its_parent_and_choice(client: TestClient, chat: dict[str, Any]) -> None:
    conversation = chat["conversation"]["id"]
    tree = client.get(f"/api/conversations/{conversation}/tree").json()
    assert tree["conversation"] == chat["conversation"]
    first, left, right, second, last = tree["messages"]
    assert [one["parent"] for one in tree["messages"]] == [None, first["id"], first["id"], right["id"], second["id"]]
    assert [one["chosen"] for one in tree["messages"]] == [True, False, True, True, True]
    assert left["text"].startswith("Answer A") and left["state"] == "complete" and left["num_token_ids"] > 0


def test_a_branch_is_the_path_from_the_root_to_a_message_shown_or_not(client: TestClient, chat: dict[str, Any]) -> None:
    hidden = chat["turns"][1]["siblings"][0]
    messages = client.get(f"/api/messages/{hidden}/branch").json()["messages"]
    assert [one["id"] for one in messages] == [chat["turns"][0]["message"]["id"], hidden]


def test_a_duplicate_goes_on_by_itself(client: TestClient, chat: dict[str, Any]) -> None:
    conversation = chat["conversation"]["id"]
    answer = client.post(f"/api/conversations/{conversation}/duplicate")
    assert answer.status_code == 201 and answer.json()["title"] == "Boats (copy)"
    copy = client.get(f"/api/conversations/{answer.json()['id']}").json()
    assert [turn["message"]["text"] for turn in copy["turns"]] == [turn["message"]["text"] for turn in chat["turns"]]
    last = copy["turns"][-1]["message"]
    after = ask(client, answer.json()["id"], "More", parent=last["id"], n=1)
    # Its history is the token ids of the first one, so the engine finds what it has of them.
    assert after["turns"][-1]["message"]["timings"]["num_cached_tokens"] > 16
    assert client.get(f"/api/conversations/{conversation}").json() == chat


def test_a_message_becomes_the_end_of_a_conversation_of_its_own(client: TestClient, chat: dict[str, Any]) -> None:
    hidden = chat["turns"][1]["siblings"][0]
    copy = client.post(f"/api/messages/{hidden}/fork", json={"title": "Other"}).json()
    assert (copy["title"], copy["system_prompt"], copy["pinned"]) == ("Other", "Be brief.", False)
    view = client.get(f"/api/conversations/{copy['id']}").json()
    assert [turn["message"]["text"][:8] for turn in view["turns"]] == ["Name a b", "Answer A"]
    assert client.post(f"/api/messages/{hidden}/fork", json={"titel": ""}).status_code == 400


def test_the_search_finds_messages_of_every_branch_page_by_page(client: TestClient, chat: dict[str, Any]) -> None:
    other = new(client, title="Other")
    ask(client, other, "A lighthouse again", n=1)
    found = client.get("/api/search", params={"query": "answer"}).json()
    assert [hit["message"] for hit in found["hits"]] == sorted((hit["message"] for hit in found["hits"]), reverse=True)
    assert len(found["hits"]) == 4 and found["next"] is None
    first = client.get("/api/search", params={"query": "lightho", "limit": 1}).json()
    assert first["hits"][0]["snippet"] == "A \x02lighthouse\x03 again" and first["hits"][0]["title"] == "Other"
    second = client.get("/api/search", params={"query": "lightho", "limit": 1, "before": first["next"]}).json()
    assert second["hits"][0]["conversation"] == chat["conversation"]["id"] and second["next"] is None
    within = client.get("/api/search", params={"query": "lightho", "conversation": other}).json()
    assert [hit["conversation"] for hit in within["hits"]] == [other]
    client.delete(f"/api/conversations/{other}")
    assert len(client.get("/api/search", params={"query": "lightho"}).json()["hits"]) == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/conversations/99/tree", 404),
        ("GET", "/api/messages/99/branch", 404),
        ("POST", "/api/conversations/99/duplicate", 404),
        ("POST", "/api/messages/99/fork", 404),
        ("GET", "/api/search?query=x&conversation=99", 404),
        ("GET", "/api/search", 400),
        ("GET", "/api/search?query=...", 400),
        ("GET", "/api/search?query=x&limit=0", 400),
        ("GET", f"/api/conversations/{10**30}/tree", 400),
    ],
)
def test_what_is_not_there_or_makes_no_sense_is_refused(
    client: TestClient, method: str, path: str, status: int
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status and answer.json()["error"]["message"]
