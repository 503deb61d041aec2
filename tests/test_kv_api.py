"""/api/kv on a scripted engine: what is refused, and what is passed on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import FakeEngine
from starlette.testclient import TestClient
from test_chat_api import ask, client_on, new, wait_for_model

from localpaged.engine.messages import Residency
from localpaged.server.kv_api import tier_of


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(tmp_path: Path, engine: FakeEngine) -> Iterator[TestClient]:
    with client_on(tmp_path, engine) as client:
        wait_for_model(client)
        yield client


@pytest.mark.parametrize("query", ["tokens=-1", "n=0", "max_tokens=0", "n=x"])
def test_a_price_for_nonsense_names_it(client: TestClient, query: str) -> None:
    answer = client.get(f"/api/kv/estimate?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.split("=")[0]


def test_the_price_counts_the_branch_and_the_draft(client: TestClient) -> None:
    view = ask(client, new(client), "Hello", n=1)
    leaf = view["turns"][-1]["message"]["id"]
    conversation = view["conversation"]["id"]
    history = client.post("/api/count", json={"conversation": conversation, "parent": leaf}).json()["history"]
    price = client.get(f"/api/kv/estimate?conversation={conversation}&parent={leaf}&tokens=7&n=2&max_tokens=50").json()
    assert price["num_prompt_tokens"] == history + 7
    assert price["max_tokens"] == 50


def test_unknown_conversations_cannot_be_pinned(client: TestClient) -> None:
    assert client.post("/api/kv/conversations/99/pin", json={"pinned": True}).status_code == 404


def test_pins_outlive_the_server(tmp_path: Path) -> None:
    engine, again = FakeEngine(), FakeEngine()
    with client_on(tmp_path, engine) as client:
        wait_for_model(client)
        first, second, third = (new(client) for _ in range(3))
        for pinned in (first, second):
            client.post(f"/api/kv/conversations/{pinned}/pin", json={"pinned": True})
        client.patch(f"/api/conversations/{third}", json={"pinned": True})
        client.post(f"/api/kv/conversations/{second}/pin", json={"pinned": False})
        # One that is pinned in the list stays so.
        client.post(f"/api/kv/conversations/{third}/pin", json={"pinned": False})
        assert engine.told[-1] == ("pin", str(third), True)
    with client_on(tmp_path, again):
        assert again.told == [("pin", str(first), True), ("pin", str(third), True)]


def test_choosing_opening_pinning_and_deleting_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    conversation = new(client)
    view = ask(client, conversation, "Hello", n=3)
    ids = [message["id"] for message in view["open_candidates"]]
    client.post(f"/api/messages/{ids[1]}/choose")
    client.patch(f"/api/conversations/{conversation}", json={"pinned": True})
    client.patch(f"/api/conversations/{conversation}", json={"archived": True})
    assert engine.told[-1] == ("pin", str(conversation), False)
    client.post("/api/messages/delete", json={"ids": [ids[0]]})
    engine.told.clear()
    client.get(f"/api/conversations/{conversation}")
    ((what, name, num_tokens),) = engine.told
    assert (what, name) == ("warm", str(conversation)) and num_tokens
    client.delete(f"/api/conversations/{conversation}")
    client.delete("/api/kv/conversations")
    assert engine.told[1:] == [("drop", str(conversation), None), ("drop", None, None)]


def test_what_is_told_on_choosing_and_pruning(client: TestClient, engine: FakeEngine) -> None:
    conversation = new(client)
    view = ask(client, conversation, "Hello", n=2)
    first, second = (message["id"] for message in view["open_candidates"])
    client.post(f"/api/messages/{first}/choose")
    ask(client, conversation, "And?", parent=first, n=1)
    engine.told.clear()
    under = client.get(f"/api/conversations/{conversation}").json()["turns"][1:]
    engine.told.clear()
    client.post("/api/messages/delete", json={"ids": [first]})
    ids = [str(turn["message"]["id"]) for turn in under]
    ((what, _, dropped),) = [told for told in engine.told if told[0] == "drop"]
    assert what == "drop" and sorted(dropped) == sorted(ids)  # type: ignore[call-overload]
    assert str(second) not in dropped  # type: ignore[operator]


def test_the_place_of_kv_is_the_nearest_one_that_has_some() -> None:
    one = Residency(
        conversation="1", num_leases=1, num_tokens=16, num_blocks=1, num_private_blocks=1, used_at=0, num_disk_tokens=16
    )
    assert (tier_of(one, gpu=True), tier_of(one, gpu=False)) == ("gpu", "host")
    one.num_blocks = 0
    one.num_host_tokens = 16
    assert tier_of(one, gpu=True) == "host"
    one.num_host_tokens = 0
    assert tier_of(one, gpu=True) == "disk"
