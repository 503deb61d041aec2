"""The OpenAPI document of the native API, and that what it declares is what is answered."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine
from starlette.testclient import TestClient
from test_chat_api import N4, ask, client_on, events_of, new, wait_for_model

from localpaged.engine.messages import Residency
from localpaged.server import native_schema as native

NATIVE = re.compile(r"/health|/api/(state|conversations|messages|jobs|count|kv|search|export|import)(/.*)?")


class ResidentEngine(FakeEngine):
    """Has the KV of conversation 1."""

    async def residency(self) -> list[Residency]:
        one = Residency(conversation="1", num_leases=1, num_tokens=9, num_blocks=1, num_private_blocks=0, used_at=1.0)
        return [one]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with client_on(tmp_path, ResidentEngine()) as client:
        wait_for_model(client)
        yield client


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def test_every_native_route_says_what_it_does_what_it_answers_and_how_it_fails(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    operations = {
        f"{method} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if NATIVE.fullmatch(path)
    }
    assert len(operations) >= 29
    for name, operation in operations.items():
        good = [code for code in operation["responses"] if code.startswith("2")]
        bad = [code for code in operation["responses"] if not code.startswith("2")]
        assert operation["summary"] and good and bad, name
        assert "422" not in bad, f"{name}: what is wrong with a request is a 400 here"
        for code in good:
            assert operation["responses"][code]["description"] != "Successful Response", name
        if "{" in name:
            assert "404" in bad or "job" in name or "delete /api/kv" in name, name


def test_the_document_refers_to_nothing_that_is_not_in_it_and_names_no_operation_twice(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    for reference in references(document):
        place: Any = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]
    names = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names))


def test_there_is_no_page_around_the_document(client: TestClient) -> None:
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404


def test_every_answer_is_as_it_is_declared(client: TestClient) -> None:
    conversation = new(client, title="Boats")
    view = ask(client, conversation, "Name a boat.")
    native.ConversationView.model_validate(view, strict=True)
    chosen = view["open_candidates"][0]["id"]
    user = view["turns"][0]["message"]["id"]

    def check(model: Any, method: str, path: str, body: Any = None) -> Any:
        answer = client.request(method, f"/api{path}", json=body)
        assert answer.status_code < 300, answer.text
        model.model_validate(answer.json(), strict=True)
        return answer.json()

    check(native.StateAnswer, "GET", "/state")
    check(native.ConversationList, "GET", "/conversations?query=boat")
    check(native.ConversationAnswer, "PATCH", f"/conversations/{conversation}", {"pinned": True})
    check(native.ConversationView, "POST", f"/messages/{chosen}/choose")
    check(native.ConversationView, "POST", f"/messages/{user}/reopen")
    check(native.TreeAnswer, "GET", f"/conversations/{conversation}/tree")
    check(native.BranchAnswer, "GET", f"/messages/{chosen}/branch")
    check(native.FoundMessages, "GET", "/search?query=boat")
    check(native.ConversationAnswer, "POST", f"/conversations/{conversation}/duplicate")
    check(native.ConversationAnswer, "POST", f"/messages/{chosen}/fork")
    check(native.Counted, "POST", "/count", {"text": "Hi"})
    started = check(native.Started, "POST", f"/messages/{user}/regenerate", {"sampling": N4})
    check(native.Stopped, "POST", f"/jobs/{started['job']}/stop", {})
    events_of(client, started["job"])
    check(native.PoolAnswer, "GET", "/kv")
    check(native.PoolAnswer, "GET", "/kv?conversations=false")
    check(native.ResidencyList, "GET", "/kv/conversations")
    check(native.Pinned, "POST", f"/kv/conversations/{conversation}/pin", {"pinned": True})
    check(native.Dropped, "DELETE", f"/kv/conversations/{conversation}")
    check(native.Dropped, "DELETE", "/kv/conversations")
    check(native.Price, "GET", "/kv/estimate?tokens=7")
    check(native.ConversationView, "POST", "/messages/delete", {"ids": [chosen]})
    check(native.Deleted, "DELETE", f"/conversations/{conversation}")
    check(native.ConversationView, "POST", f"/conversations/{conversation}/restore")
    exported = client.get("/api/export")
    native.Imported.model_validate(client.post("/api/import", content=exported.content).json(), strict=True)
    native.ErrorAnswer.model_validate(client.get("/api/conversations/99").json(), strict=True)
