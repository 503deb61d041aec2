"""Several users: keys, logins, and conversations that nobody else can see, by any route."""

import json
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import MODEL, ApiEngine, serving

from localpaged.errors import SettingError
from localpaged.server.access import Access, check_bind
from localpaged.server.users import Users

OWN_KEY = "the key of the server itself"


def test_keys_are_told_once_and_kept_as_hashes(tmp_path: Path) -> None:
    users = Users(tmp_path / "users.json")
    key = users.add("anna")
    assert key not in (tmp_path / "users.json").read_text()
    assert stat.S_IMODE((tmp_path / "users.json").stat().st_mode) == 0o600
    found = Users(tmp_path / "users.json").with_key(key)
    assert found is not None and found.name == "anna"
    assert users.with_key(key + "x") is None and users.with_key("") is None
    other = users.add("bert")
    assert other != key and [user.name for user in users.all()] == ["anna", "bert"]
    users.remove("anna")
    assert users.with_key(key) is None and users.with_key(other) is not None


@pytest.mark.parametrize("name", ["", "Anna", "an na", "a.b", "ä", "x" * 33, "-a", "a\n"])
def test_names_are_plain(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingError, match="no user name"):
        Users(tmp_path / "users.json").add(name)


def test_names_are_taken_once_and_files_that_are_no_users_are_told(tmp_path: Path) -> None:
    users = Users(tmp_path / "users.json")
    users.add("anna")
    with pytest.raises(SettingError, match="already"):
        users.add("anna")
    with pytest.raises(SettingError, match="no user bert"):
        users.remove("bert")
    (tmp_path / "users.json").write_text("{")
    with pytest.raises(SettingError, match="cannot be read"):
        users.all()


def test_users_do_for_an_address_beyond_this_machine(tmp_path: Path) -> None:
    users = Users(tmp_path / "users.json")
    with pytest.raises(SettingError, match="user add"):
        check_bind("0.0.0.0", None, users)
    users.add("anna")
    check_bind("0.0.0.0", None, users)


@pytest.fixture(scope="module")
def engine() -> ApiEngine:
    return ApiEngine()


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Users:
    return Users(tmp_path_factory.mktemp("users") / "users.json")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, users: Users, engine: ApiEngine) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("server"), engine, users=users, api_key=OWN_KEY) as address:
        yield address


def client_of(server: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=server, headers={"Authorization": f"Bearer {key}"}, timeout=20)


@pytest.fixture(scope="module")
def anna(server: str, users: Users) -> Iterator[httpx.Client]:
    with client_of(server, users.add("anna")) as client:
        yield client


@pytest.fixture(scope="module")
def bert(server: str, users: Users) -> Iterator[httpx.Client]:
    with client_of(server, users.add("bert")) as client:
        yield client


def talk(client: httpx.Client, text: str) -> dict[str, Any]:
    """A conversation with one answered message; its view."""
    conversation = client.post("/api/conversations", json={"title": text}).json()["conversation"]["id"]
    body = {"parent": None, "text": text, "sampling": {"n": 2}}
    client.post(f"/api/conversations/{conversation}/messages", json=body).raise_for_status()
    for _ in range(400):
        view: dict[str, Any] = client.get(f"/api/conversations/{conversation}").json()
        if view["job"] is None:
            return view
        time.sleep(0.01)
    raise AssertionError("It goes on to answer.")


def test_each_key_and_each_session_is_of_one_user(server: str, users: Users, anna: httpx.Client) -> None:
    title = talk(anna, "Anna's plans")["conversation"]["title"]
    assert anna.get("/api/conversations").json()["total"] == 1
    with client_of(server, OWN_KEY) as own:
        assert own.get("/api/conversations").json()["conversations"] == []
    key = anna.headers["Authorization"].removeprefix("Bearer ")
    with httpx.Client(base_url=server, follow_redirects=False) as browser:
        assert browser.get("/api/conversations").status_code == 401
        assert browser.post("/login", data={"key": "wrong"}).status_code == 401
        assert browser.post("/login", data={"key": key}).status_code == 303
        assert [one["title"] for one in browser.get("/api/conversations").json()["conversations"]] == [title]
        assert key not in json.dumps(dict(browser.cookies))
        # A session that says that it is another's is nobody's.
        name, forged = next((name, value.replace("anna", "bert")) for name, value in browser.cookies.items())
        assert httpx.get(f"{server}/api/state", cookies={name: forged}).status_code == 401
        browser.post("/logout")
        assert browser.get("/api/conversations").status_code == 401


def test_users_are_told_their_names_and_the_data_folder_only_to_whoever_has_the_servers_key(
    server: str, anna: httpx.Client
) -> None:
    told = anna.get("/api/state").json()
    assert (told["user"], told["needs_login"], told["data_folder"]) == ("anna", True, None)
    with client_of(server, OWN_KEY) as own:
        told = own.get("/api/state").json()
    assert (told["user"], told["needs_login"]) == ("", True) and Path(told["data_folder"]).is_dir()


def test_a_removed_user_is_out_at_once_and_the_conversations_stay(server: str, users: Users) -> None:
    with client_of(server, users.add("carl")) as carl:
        talk(carl, "Carl's plans")
        with httpx.Client(base_url=server) as browser:
            browser.post("/login", data={"key": carl.headers["Authorization"].removeprefix("Bearer ")})
            assert browser.get("/api/state").status_code == 200
            users.remove("carl")
            assert browser.get("/api/state").status_code == 401
        assert carl.get("/api/conversations").status_code == 401
    with client_of(server, users.add("carl")) as again:
        assert [one["title"] for one in again.get("/api/conversations").json()["conversations"]] == ["Carl's plans"]


def test_nobody_reaches_anothers_conversation_by_any_route_of_the_document(
    server: str, anna: httpx.Client, bert: httpx.Client, engine: ApiEngine
) -> None:
    """Every native route that takes an id is called by Bert with Anna's; none may work, tell a word, or change one."""
    view = talk(anna, "Xylophone secret")
    conversation = view["conversation"]["id"]
    answer = view["open_candidates"][0]["id"]
    response = anna.post("/v1/responses", json={"model": MODEL, "input": "Xylophone too"}).json()["id"]
    before = anna.get(f"/api/conversations/{conversation}/tree").json()
    told = len(engine.told)
    ids = {"conversation_id": conversation, "message_id": answer, "response_id": response, "job_id": "none"}
    bodies: dict[str, Any] = {
        "/api/conversations/{conversation_id}/messages": {"parent": answer, "text": "x"},
        "/api/kv/conversations/{conversation_id}/pin": {"pinned": True},
        "/api/messages/delete": {"ids": [answer]},
        "/api/count": {"conversation": conversation, "parent": answer, "text": "x"},
    }
    paths = anna.get("/openapi.json").json()["paths"]
    tried = 0
    for path, methods in paths.items():
        if not any("{" + name + "}" in path for name in ids) and path not in bodies:
            continue
        if "job_id" in path:
            continue
        for method in methods:
            called = bert.request(method, path.format(**ids), json=bodies.get(path, {}))
            tried += 1
            assert called.status_code == 404, (method, path, called.status_code, called.text)
            assert "ylophone" not in called.text
    assert tried >= 20
    # Ids within bodies and queries.
    assert bert.get(f"/api/kv/estimate?conversation={conversation}").status_code == 404
    assert bert.get(f"/api/kv/estimate?parent={answer}").status_code == 404
    assert bert.get(f"/api/search?query=xylophone&conversation={conversation}").status_code == 404
    more = {"model": MODEL, "input": "x", "previous_response_id": response}
    for store in (True, False):
        assert bert.post("/v1/responses", json=more | {"store": store}).status_code == 404
    own = bert.post("/api/conversations", json={}).json()["conversation"]["id"]
    body = {"parent": answer, "text": "x"}
    assert bert.post(f"/api/conversations/{own}/messages", json=body).status_code in (400, 404)
    # What lists and searches.
    for path in ("/api/conversations", "/api/conversations?query=xylophone", "/api/search?query=xylophone"):
        assert "ylophone" not in bert.get(path).text
    assert "ylophone" in anna.get("/api/search?query=xylophone").text
    for format in ("json", "markdown"):
        assert b"ylophone" not in bert.get(f"/api/export?format={format}").content
    # Nothing has changed.
    assert anna.get(f"/api/conversations/{conversation}/tree").json() == before
    assert engine.told[told:] == []
    assert bert.delete("/api/kv/conversations").status_code == 200
    assert engine.told[told:] == [("drop", str(own), None)]


def test_a_job_is_followed_and_stopped_by_its_owner_alone(anna: httpx.Client, bert: httpx.Client) -> None:
    conversation = anna.post("/api/conversations", json={}).json()["conversation"]["id"]
    body = {"parent": None, "text": "Xylophone", "sampling": {"n": 1}}
    job = anna.post(f"/api/conversations/{conversation}/messages", json=body).json()["job"]
    assert bert.post(f"/api/jobs/{job}/stop", json={}).status_code == 200
    assert bert.get(f"/api/jobs/{job}/events").status_code == 204
    events = anna.get(f"/api/jobs/{job}/events?cursor=0").text
    assert '"finish":"stop"' in events and "cancelled" not in events


def test_what_a_user_imports_is_the_users(anna: httpx.Client, bert: httpx.Client) -> None:
    exported = anna.get("/api/export").content
    imported = bert.post("/api/import", content=exported).json()["imported"]
    assert imported
    assert all(anna.get(f"/api/conversations/{one}").status_code == 404 for one in imported)
    assert all(bert.get(f"/api/conversations/{one}").status_code == 200 for one in imported)


def test_without_keys_everybody_is_the_one_user() -> None:
    from starlette.datastructures import Headers

    assert Access().user_of(Headers({})) == ""
    assert not Access().needs_key
