"""A disk that is full and a database that cannot be written: what was confirmed stays, the rest is refused clearly."""

import asyncio
import json
import os
import resource
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import MODEL, ApiEngine, application, listening
from fakes import FakeEngine
from job_helpers import ONE, running, until

from localpaged.errors import StoreError
from localpaged.store.message import Message
from localpaged.store.store import Store

sys.path.insert(0, str(Path(__file__).parent / "e2e"))
from server_process import ServerProcess, scripted  # noqa: E402

CHAT: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
NOBODY = 65534


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = scripted(tmp_path, FAKE_PAGE="0", FAKE_TOKEN_S="0.002").start()
    yield process
    process.stop(signal.SIGKILL)


class Disk:
    """The disk of a server process: full for every file that it writes, or with room again."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        # Python ignores SIGXFSZ: writes raise, as those on a full disk do.
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (0, self._limits[1]))

    def free(self) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, self._limits)


def ask(url: str, conversation: int, parent: int | None, text: str, **sampling: Any) -> httpx.Response:
    body = {"parent": parent, "text": text, "sampling": sampling}
    return httpx.post(f"{url}/api/conversations/{conversation}/messages", json=body, timeout=20)


def follow(url: str, job: str, until_type: str = "done") -> list[Any]:
    """The events of a job up to one of this type."""
    events = []
    with httpx.stream("GET", f"{url}/api/jobs/{job}/events", timeout=30) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if events[-1]["type"] == until_type:
                    break
    return events


def texts(url: str, conversation: int) -> list[str]:
    shown = httpx.get(f"{url}/api/conversations/{conversation}").json()
    return [turn["message"]["text"] for turn in shown["turns"]]


def test_on_a_full_disk_messages_are_refused_what_is_there_is_read_and_answers_go_on(server: ServerProcess) -> None:
    url = server.url
    conversation = httpx.post(f"{url}/api/conversations", json={}).json()["conversation"]["id"]
    follow(url, ask(url, conversation, None, "First").json()["job"])
    saved = texts(url, conversation)
    answer = httpx.get(f"{url}/api/conversations/{conversation}").json()["turns"][-1]["message"]["id"]
    disk = Disk(server.pid)
    disk.fill()
    refused = ask(url, conversation, answer, "Second")
    assert refused.status_code == 503
    assert "disk" in refused.json()["error"]["message"].lower()
    assert texts(url, conversation) == saved
    # Answers of the APIs are not stored: they need no disk.
    assert httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"model": MODEL}).status_code == 200
    assert httpx.get(f"{url}/health").status_code == 200
    disk.free()
    # What was refused left nothing behind.
    assert texts(url, conversation) == saved
    follow(url, ask(url, conversation, answer, "Second").json()["job"])
    assert texts(url, conversation)[:3] == [*saved, "Second"]


def test_a_disk_that_fills_up_during_an_answer_keeps_its_text_until_there_is_room(server: ServerProcess) -> None:
    url, disk = server.url, Disk(server.pid)
    conversation = httpx.post(f"{url}/api/conversations", json={}).json()["conversation"]["id"]
    job = ask(url, conversation, None, "something slow", max_tokens=700).json()["job"]
    follow(url, job, "tokens")
    disk.fill()
    follow(url, job, "unsaved")
    disk.free()
    ends = follow(url, job)
    assert ends[-1]["error"] is None
    text = ends[0]["candidates"][0]["text"] + "".join(
        part["text"] for event in ends if event["type"] == "tokens" for part in event["candidates"]
    )
    assert texts(url, conversation)[-1] == text and len(text) > 1000


def test_a_server_that_stops_on_a_full_disk_stops(server: ServerProcess) -> None:
    url, disk = server.url, Disk(server.pid)
    conversation = httpx.post(f"{url}/api/conversations", json={}).json()["conversation"]["id"]
    follow(url, ask(url, conversation, None, "First").json()["job"])
    other = httpx.post(f"{url}/api/conversations", json={}).json()["conversation"]["id"]
    follow(url, ask(url, other, None, "something slow", max_tokens=None).json()["job"], "tokens")
    disk.fill()
    process = server._process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    # 120: Python itself could not write what was left of its output, which goes to a file here.
    assert process.wait(20) in (0, 120), server.log()[-2000:]
    server.start()
    assert texts(url, conversation) == ["First", texts(url, conversation)[1]] and texts(url, conversation)[1]
    shown = httpx.get(f"{url}/api/conversations/{other}").json()["turns"]
    # Confirmed was the message; of the answer there is what had been stored.
    assert shown[0]["message"]["text"] == "something slow"
    assert [turn["message"]["state"] for turn in shown[1:]] in ([], ["interrupted"])


def test_closing_tries_once_more_and_gives_up_where_nothing_can_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(refuses: bool) -> str:
        engine = FakeEngine()
        async with running(tmp_path, engine, flush_s=60) as (jobs, store):
            conversation = store.conversations.create()
            save, tries = store.conversations.save_messages, 0

            def refuse(messages: list[Message]) -> None:
                nonlocal tries
                if messages[0].role == "assistant":
                    tries += 1
                    if refuses or tries == 1:
                        raise StoreError("The disk is full.")
                save(messages)

            monkeypatch.setattr(store.conversations, "save_messages", refuse)
            job = await jobs.ask(conversation.id, None, "Hi", ONE)
            await until(lambda: any(event["type"] == "unsaved" for event in job.log))
            await asyncio.wait_for(jobs.close(), 10)
            return store.conversations.branch(conversation.id).turns[-1].message.text

    assert asyncio.run(run(refuses=False)) == "Answer A: it is **paged**."
    assert asyncio.run(run(refuses=True)) == ""


def test_a_database_that_becomes_read_only_is_told_and_is_used_again_when_it_is_not(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    app = application(ApiEngine(), store)
    with listening(app) as url:
        conversation = httpx.post(f"{url}/api/conversations", json={}).json()["conversation"]["id"]
        follow(url, ask(url, conversation, None, "First").json()["job"])
        connection = store._database._db.conn
        connection.execute("PRAGMA query_only=1")
        saved = texts(url, conversation)
        calls = [
            ("POST", "/api/conversations", {}),
            ("PATCH", f"/api/conversations/{conversation}", {"title": "x"}),
            ("DELETE", f"/api/conversations/{conversation}", None),
            ("POST", f"/api/conversations/{conversation}/messages", {"parent": None, "text": "x"}),
            ("POST", "/v1/responses", {"input": "x"}),
        ]
        for method, path, body in calls:
            answer = httpx.request(method, url + path, json=body)
            assert answer.status_code == 503, (path, answer.text)
            assert "read-only" in answer.json()["error"]["message"]
        assert texts(url, conversation) == saved
        assert httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"model": MODEL}).status_code == 200
        connection.execute("PRAGMA query_only=0")
        assert ask(url, conversation, None, "Again").status_code == 202


def test_a_server_does_not_start_on_a_file_that_it_may_not_write() -> None:
    """Owned by another user: as the one who runs it for root, whom nothing is forbidden."""
    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "chats.db"
        with closing(Store(path)) as store:
            conversation = store.conversations.create("kept")
        content = path.read_bytes()
        folder.chmod(0o777)
        (folder / "chats.db.lock").unlink(missing_ok=True)
        path.chmod(0o444)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(NOBODY)
        try:
            with pytest.raises(StoreError, match="read-only|cannot be written|cannot be opened"):
                Store(path)
        finally:
            if is_root:
                os.seteuid(0)
        assert path.read_bytes() == content
        path.chmod(0o644)
        (folder / "chats.db.lock").unlink(missing_ok=True)
        with closing(Store(path)) as store:
            assert store.conversations.get(conversation.id).title == "kept"
            with sqlite3.connect(path) as db:
                assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            db.close()
