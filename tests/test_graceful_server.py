"""How a server process stops: what runs ends or is parked, nothing new begins, and the exit code is 0."""

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent / "e2e"))
from server_process import ServerProcess, scripted

SLOW: Any = {"messages": [{"role": "user", "content": "something slow"}], "stream": True}


@contextmanager
def running(folder: Path, stop_timeout_s: float) -> Iterator[tuple[ServerProcess, "subprocess.Popen[bytes]"]]:
    server = scripted(folder, FAKE_STOP_TIMEOUT_S=str(stop_timeout_s), FAKE_PAGE="0").start()
    process = server._process
    assert process is not None
    try:
        yield server, process
    finally:
        server.stop()


def test_a_stream_comes_to_its_end_while_nothing_new_is_let_in(tmp_path: Path) -> None:
    with running(tmp_path, 30) as (server, process), httpx.Client(timeout=20) as kept:
        assert kept.get(f"{server.url}/health").status_code == 200
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=SLOW | {"max_tokens": 150}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_for_refusal(lambda: kept.post(f"{server.url}/v1/chat/completions", json=SLOW))
            *_, last, done = [line for line in lines if line]
        assert done == "data: [DONE]"
        assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
        assert process.wait(10) == 0


def wait_for_refusal(ask: Callable[[], httpx.Response]) -> None:
    for _ in range(100):
        try:
            answer = ask()
        except httpx.TransportError:
            return
        if answer.status_code == 503:
            assert int(answer.headers["Retry-After"]) > 0 and answer.json()["error"]["code"] == "stopping"
            return
        time.sleep(0.02)
    raise AssertionError("It goes on to take requests.")


def test_what_does_not_end_in_time_is_parked_with_its_text(tmp_path: Path) -> None:
    with running(tmp_path, 0.3) as (server, process):
        api = f"{server.url}/api"
        conversation = httpx.post(f"{api}/conversations", json={}).json()["conversation"]["id"]
        body = {"parent": None, "text": "something slow", "sampling": {"n": 2, "max_tokens": None}}
        httpx.post(f"{api}/conversations/{conversation}/messages", json=body).raise_for_status()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    with sqlite3.connect(tmp_path / "chats.db") as db:
        rows = db.execute("SELECT state, text FROM messages WHERE role = 'assistant'").fetchall()
    assert [state for state, _ in rows] == ["interrupted"] * 2
    assert all(text.startswith("A slow answer goes on") for _, text in rows)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait(tmp_path: Path, how: signal.Signals) -> None:
    with (
        running(tmp_path, 600) as (server, process),
        httpx.stream("POST", f"{server.url}/v1/chat/completions", json=SLOW, timeout=20) as answer,
    ):
        next(answer.iter_lines())
        process.send_signal(how)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(15)
