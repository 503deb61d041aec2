"""Logs: one JSON object a line, whatever clients send; request ids; no prompt, no key, no query."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import MODEL, ApiEngine, serving

from localpaged.log import REQUEST_ID, log_to

KEY = "a-secret-key-of-this-test"
SECRET = "the secret of the message"


@pytest.fixture
def root_logger() -> Iterator[None]:
    """The root logger as it was, once the test is over."""
    root, raises = logging.getLogger(), logging.raiseExceptions
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:], logging.raiseExceptions = handlers, raises
    root.setLevel(level)


def lines(folder: Path, program: str = "server") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{program}.log").read_text().splitlines()]


@pytest.mark.usefixtures("root_logger")
def test_requests_are_lines_with_ids_and_without_what_was_said(tmp_path: Path, capfd: Any) -> None:
    log_to(tmp_path / "logs", "server")
    body = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}]}
    with serving(tmp_path, ApiEngine(), api_key=KEY) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        made = httpx.post(f"{server}/v1/chat/completions?token={KEY}", json=body, headers=headers)
        own = httpx.get(f"{server}/v1/models", headers=headers | {"X-Request-ID": "mine-7"})
        refused = httpx.get(f"{server}/v1/models", headers={"X-Request-ID": "a b\tc", "Authorization": "Bearer wrong"})
        forged = httpx.get(f'{server}/v1/x%0a{{"level":"error"}}%0d%1b[31m', headers=headers)
        httpx.get(f"{server}/health")
    assert own.headers["X-Request-ID"] == "mine-7"
    assert re.fullmatch("[0-9a-f]{16}", refused.headers["X-Request-ID"])
    found = {line["request_id"]: line for line in lines(tmp_path / "logs") if line["logger"] == "localpaged.request"}
    assert len(found) == 4
    line = found[made.headers["X-Request-ID"]]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert line["bytes"] == len(made.content) and line["seconds"] >= 0 and "cut_off" not in line
    assert found[refused.headers["X-Request-ID"]]["status"] == 401
    assert found[forged.headers["X-Request-ID"]]["path"] == '/v1/x\n{"level":"error"}\r\x1b[31m'
    text = (tmp_path / "logs" / "server.log").read_text()
    printed = "".join(capfd.readouterr())
    for secret in (KEY, SECRET):
        assert secret not in text and secret not in printed


@pytest.mark.usefixtures("root_logger")
def test_what_the_terminal_shows_of_a_record_is_one_line(tmp_path: Path, capfd: Any) -> None:
    log_to(tmp_path, "server")
    token = REQUEST_ID.set("request-1")
    logging.getLogger("x").warning("a\nb\x1b[31m %s", "c\r\nd")
    REQUEST_ID.reset(token)
    assert capfd.readouterr().err.count("\n") == 1
    (line,) = lines(tmp_path)
    assert (line["message"], line["request_id"], line["level"]) == ("a\nb\x1b[31m c\r\nd", "request-1", "warning")


@pytest.mark.usefixtures("root_logger")
def test_files_rotate_and_their_number_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localpaged.log.MAX_FILE_BYTES", 2000)
    log_to(tmp_path, "server")
    for number in range(300):
        logging.getLogger("x").info("record %d", number)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["server.log", *(f"server.log.{i}" for i in range(1, 6))]
    assert all(file.stat().st_size <= 2000 for file in tmp_path.iterdir())
    assert lines(tmp_path)[-1]["message"] == "record 299"


@pytest.mark.usefixtures("root_logger")
def test_a_folder_that_cannot_be_written_is_told_and_nothing_else_happens(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "file").write_text("")
    log_to(tmp_path / "file" / "logs", "server")
    assert "No log is written" in capfd.readouterr().err
