"""Export and import over HTTP and on the command line."""

import io
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fakes import FakeEngine
from starlette.testclient import TestClient
from test_chat_api import ask, client_on, new, wait_for_model

from localpaged.cli import main
from localpaged.errors import StoreError
from localpaged.server import transfer_api
from localpaged.store.store import Store
from localpaged.store.transfer import conversation_ids, read_transcript

Run = Callable[..., tuple[int, str, str]]
DATA = Path(__file__).parent / "data"
CHATGPT = (DATA / "chatgpt_conversations.json").read_bytes()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(tmp_path: Path, engine: FakeEngine) -> Iterator[TestClient]:
    with client_on(tmp_path, engine) as client:
        wait_for_model(client)
        yield client


def test_one_conversation_is_downloaded_and_comes_back_equal(client: TestClient) -> None:
    conversation = new(client, title='Boats: "é"\r\nX-Evil: 1', system_prompt="Be brief.")
    ask(client, conversation, "Name a boat.")
    answer = client.get(f"/api/conversations/{conversation}/export")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-disposition"] == (
        "attachment; filename=\"Boats e X-Evil 1.json\"; filename*=UTF-8''Boats%20%C3%A9%20X-Evil%201.json"
    )
    assert "x-evil" not in answer.headers and answer.headers["cache-control"] == "no-store"
    imported = client.post("/api/import", content=answer.content).json()
    assert imported == {"source": "localpaged", "imported": [conversation + 1], "skipped": []}
    again = client.get(f"/api/conversations/{imported['imported'][0]}/export")
    assert again.content == answer.content
    # And it goes on where it was.
    view = client.get(f"/api/conversations/{conversation + 1}").json()
    last = view["open_candidates"][0]["id"]
    after = ask(client, conversation + 1, "More", parent=last, n=1)
    assert after["turns"][-1]["message"]["timings"]["num_cached_tokens"] > 16


def test_all_conversations_are_one_download(client: TestClient) -> None:
    for title in ("one", "two"):
        ask(client, new(client, title=title), "Hi", n=1)
    answer = client.get("/api/export")
    assert 'filename="localpaged.json"' in answer.headers["content-disposition"]
    whole = answer.json()
    assert (whole["format"], whole["version"]) == ("localpaged-conversations", 1)
    assert [one["title"] for one in whole["conversations"]] == ["one", "two"]
    assert len(client.post("/api/import", content=answer.content).json()["imported"]) == 2


def test_markdown_is_a_document_or_a_zip_of_documents(client: TestClient) -> None:
    conversation = new(client, title="Boats")
    ask(client, conversation, "Name a boat.", n=1)
    answer = client.get(f"/api/conversations/{conversation}/export?format=markdown")
    assert answer.headers["content-type"] == "text/markdown; charset=utf-8"
    assert 'filename="Boats.md"' in answer.headers["content-disposition"]
    assert "## 1 · You\n\nName a boat.\n" in answer.text
    whole = client.get("/api/export?format=markdown")
    with zipfile.ZipFile(io.BytesIO(whole.content)) as archive:
        assert archive.read("0001 Boats.md").decode() == answer.text
    assert client.post("/api/import", content=answer.content).json()["error"]["message"].startswith("This is Markdown")


def test_a_conversation_that_goes_while_all_are_downloaded_is_left_out(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gone = new(client, title="kept"), new(client, title="gone")
    monkeypatch.setattr(transfer_api, "conversation_ids", lambda chats: [gone, kept])
    client.delete(f"/api/conversations/{gone}")
    assert [one["title"] for one in client.get("/api/export").json()["conversations"]] == ["kept"]


def test_an_import_says_what_it_left_out_and_pins_what_is_pinned(client: TestClient, engine: FakeEngine) -> None:
    answer = client.post("/api/import", content=CHATGPT, headers={"Content-Type": "application/octet-stream"})
    body = answer.json()
    assert answer.status_code == 200 and body["source"] == "ChatGPT" and len(body["imported"]) == 2
    assert {"what": "image", "why": "the text has a note in its place", "count": 2} in body["skipped"]
    assert engine.told == [("pin", str(body["imported"][0]), True)]
    view = client.get(f"/api/conversations/{body['imported'][0]}").json()
    assert [turn["message"]["role"] for turn in view["turns"]] == ["user", "assistant"] * 2
    # An imported conversation, which has no token ids, goes on like any other.
    after = ask(client, body["imported"][0], "More", parent=view["turns"][-1]["message"]["id"], n=1)
    assert after["turns"][-1]["message"]["state"] == "complete"


@pytest.mark.parametrize(
    ("content", "type", "says"),
    [
        (b"", "application/json", "empty"),
        (b'{"mapping": [', "application/json", "truncated"),
        (b"--x\r\n", "multipart/form-data; boundary=x", "--data-binary"),
    ],
)
def test_what_cannot_be_imported_is_a_400_with_the_reason(
    client: TestClient, content: bytes, type: str, says: str
) -> None:
    answer = client.post("/api/import", content=content, headers={"Content-Type": type})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]
    assert client.get("/api/conversations").json()["total"] == 0


def test_a_full_disk_in_the_middle_says_what_was_imported(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    real = transfer_api.write_transcript

    def failing(chats, transcript):  # type: ignore[no-untyped-def]
        if not transcript.title:
            raise StoreError("The disk is full.")
        return real(chats, transcript)

    monkeypatch.setattr(transfer_api, "write_transcript", failing)
    answer = client.post("/api/import", content=CHATGPT)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "The disk is full. 1 of 2 conversations were imported: [1]."


@pytest.mark.parametrize("path", ["/api/conversations/9/export", "/api/export?format=pdf"])
def test_an_export_of_nothing_or_as_nothing_is_refused(client: TestClient, path: str) -> None:
    assert client.get(path).status_code in (400, 404)


@pytest.fixture
def localpaged(fresh_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the program in this process, with a home of its own: exit code, output, what it complains of."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["localpaged", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


def test_the_command_line_imports_and_exports_and_says_what_it_left_out(localpaged: Run, fresh_home: Path) -> None:
    code, said, _ = localpaged("import", str(DATA / "chatgpt_conversations.json"))
    assert code == 0 and said.startswith("Imported 2 conversations from ChatGPT.\n")
    assert "Left out: image (2 times): the text has a note in its place\n" in said
    file = fresh_home / "all.json"
    _, said, _ = localpaged("export", str(file), "--json")
    assert json.loads(said) == {"file": str(file), "conversations": 2, "bytes": file.stat().st_size}
    assert localpaged("export")[1].encode() == file.read_bytes()
    _, said, _ = localpaged("export", "--format", "markdown", "--conversation", "1")
    assert said.startswith('---\ntitle: "Boats"\n')
    _, said, _ = localpaged("import", str(file), "--json")
    assert json.loads(said) == {"source": "localpaged", "imported": [3, 4], "skipped": []}
    assert localpaged("export", str(file), "--force")[1].startswith("Exported 4 conversations to ")
    assert sorted(path.name for path in fresh_home.iterdir()) == ["all.json", "chats.db", "chats.db.lock"]
    with closing(Store(fresh_home / "chats.db")) as store:
        chats = store.conversations
        one, _, again, _ = (read_transcript(chats, conversation) for conversation in conversation_ids(chats))
        assert one.messages == again.messages


def test_the_command_line_says_the_remedy_for_what_it_cannot_do(localpaged: Run, fresh_home: Path) -> None:
    def refused(says: str, *arguments: str) -> None:
        code, _, error = localpaged(*arguments)
        assert code == 2 and len(error.splitlines()) == 1 and says in error

    refused("There is no database", "export")
    refused("cannot be read", "import", "nowhere.json")
    refused("json or markdown", "export", "--format", "pdf")
    refused("Give the FILE", "export", "--json")
    file = fresh_home / "all.json"
    file.write_text("mine")
    refused("is there already", "export", str(file))
    refused("no JSON and no zip", "import", str(file))
    with closing(Store(fresh_home / "chats.db")):
        refused("GET /api/export", "export")
        refused("POST /api/import", "import", str(DATA / "openwebui_chats.json"))
    refused("no conversation 7", "export", "--conversation", "7")
    refused("cannot be written", "export", str(fresh_home / "none" / "all.json"))
    assert file.read_text() == "mine"
