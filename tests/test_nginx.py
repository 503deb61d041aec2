"""Behind nginx as a distribution sets it up, buffering and compressing, streams arrive piece by piece.

The scripted engine holds back what follows the first tokens: what arrives before it is let go was not buffered.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import MODEL, ApiEngine, PlainTokenizer, serving, wait_until

from localpaged.server.limits import RequestLimits

ROOT = Path(__file__).parent.parent
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
LARGEST = 8 << 20
CONFIG = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    gzip on;
    gzip_types text/event-stream application/x-ndjson application/json;
    server {{
        listen 127.0.0.1:{port};
        {more}
        location / {{
            proxy_pass {upstream};
            proxy_http_version 1.1;
            proxy_buffering on;
            proxy_set_header Host $proxy_host;
        }}
    }}
}}
"""


@pytest.fixture(scope="module")
def nginx() -> str:
    command = [sys.executable, str(ROOT / "scripts" / "find_program.py"), "nginx"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        # Under plain pytest, or where it cannot be installed: `make test` tries to. -ra shows why.
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()


@contextmanager
def behind(nginx: str, folder: Path, upstream: str, more: str = "") -> Iterator[str]:
    """nginx in front of a server; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.chmod(0o755)
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, port=port, upstream=upstream, more=more))
    user = ["-g", "user root;"] if os.geteuid() == 0 else []
    process = subprocess.Popen([nginx, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log"), *user])
    try:

        def is_up() -> bool:
            assert process.poll() is None, (folder / "error.log").read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(is_up)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


class QuickTokenizer(PlainTokenizer):
    """Also quick at texts of megabytes."""

    def encode(self, text: str) -> list[int]:
        return [65] * len(text) if len(text) > 100_000 else super().encode(text)


@pytest.fixture(scope="module")
def engine() -> ApiEngine:
    engine = ApiEngine()
    engine.tokenizer = QuickTokenizer()
    return engine


@pytest.fixture(scope="module")
def proxy(nginx: str, engine: ApiEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("nginx")
    limits = RequestLimits(max_body_bytes=LARGEST)
    with (
        serving(folder, engine, limits=limits) as server,
        behind(nginx, folder, server, f"client_max_body_size {LARGEST + 1};") as address,
    ):
        yield address


def start_of(proxy: str, kind: str) -> tuple[str, str, Any]:
    """(method, path, body) of a stream."""
    if kind == "chat":
        return "POST", "/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "stream": True}
    if kind == "messages":
        body = {"model": MODEL, "messages": MESSAGES, "stream": True, "max_tokens": 64}
        return "POST", "/v1/messages", body
    if kind == "ollama":
        return "POST", "/api/chat", {"model": MODEL, "messages": MESSAGES}
    conversation = httpx.post(f"{proxy}/api/conversations", json={}).json()["conversation"]["id"]
    asked = {"parent": None, "text": "Hi", "sampling": {"n": 2}}
    job = httpx.post(f"{proxy}/api/conversations/{conversation}/messages", json=asked).json()["job"]
    return "GET", f"/api/jobs/{job}/events", None


@pytest.mark.parametrize("kind", ["chat", "messages", "ollama", "page"])
def test_the_first_tokens_arrive_while_the_rest_is_still_to_be_computed(
    proxy: str, engine: ApiEngine, kind: str
) -> None:
    hold = engine.hold = asyncio.Event()
    try:
        method, path, body = start_of(proxy, kind)
        # As browsers do: nginx is free to compress what it passes on.
        headers = {"Accept-Encoding": "gzip"}
        with httpx.stream(method, proxy + path, json=body, headers=headers, timeout=20) as response:
            assert response.headers["server"].startswith("nginx")
            said, pieces = "", response.iter_text()
            # "A", the first letter of every answer, and no letter more until the rest is let go.
            while '"A"' not in said:
                said += next(pieces)
            assert "paged" not in said
            hold.set()
            said += "".join(pieces)
    finally:
        engine.hold = None
        hold.set()
    assert text_of(kind, said) == "Answer A: it is **paged**."


def text_of(kind: str, said: str) -> str:
    """The first answer's text in what arrived; it must have come to its end."""
    events = [
        json.loads(line.removeprefix("data: ")) for line in said.splitlines() if line.startswith(("data: {", "{"))
    ]
    if kind == "chat":
        assert said.rstrip().endswith("data: [DONE]")
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    if kind == "messages":
        assert events[-1]["type"] == "message_stop"
        return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    if kind == "ollama":
        assert events[-1]["done"]
        return "".join(event["message"]["content"] for event in events)
    assert events[-1]["type"] == "done"
    parts = [part for event in events for part in event.get("candidates", []) if part["i"] == 0]
    return "".join(part["text"] for part in parts)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_nginx_cancels_behind_it(proxy: str, engine: ApiEngine, stream: bool) -> None:
    closed, ended, asked = engine.closed, engine.ended, len(engine.prompts)
    hold = engine.hold = asyncio.Event()
    try:
        body = {"model": MODEL, "messages": MESSAGES, "stream": stream, "n": 3}

        async def leave() -> None:
            async with httpx.AsyncClient(timeout=20) as client:
                request = asyncio.create_task(client.post(f"{proxy}/v1/chat/completions", json=body))
                while len(engine.prompts) == asked:
                    await asyncio.sleep(0.01)
                request.cancel()

        asyncio.run(leave())
        wait_until(lambda: engine.closed == closed + 1)
        assert engine.ended == ended
    finally:
        engine.hold = None
        hold.set()


async def body_of(size: int) -> AsyncIterator[bytes]:
    """A chat of exactly so many bytes, in pieces."""
    start, end = b'{"messages": [{"role": "user", "content": "', b'"}], "max_tokens": 1}'
    yield start
    left = size - len(start) - len(end)
    while left:
        piece = min(left, 1 << 16)
        yield b"x" * piece
        left -= piece
    yield end


@pytest.mark.parametrize(("size", "status"), [(LARGEST, 400), (LARGEST + 1, 413), (LARGEST + 2, 413)])
def test_an_upload_of_the_largest_size_arrives_and_one_byte_more_is_a_413(proxy: str, size: int, status: int) -> None:
    """400: it was read, and is too long for the model."""

    async def send() -> httpx.Response:
        headers = {"Content-Type": "application/json", "Content-Length": str(size)}
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.post(f"{proxy}/v1/chat/completions", content=body_of(size), headers=headers)

    answer = asyncio.run(send())
    assert answer.status_code == status, answer.text
    if size == LARGEST:
        assert "the model's window is" in answer.json()["error"]["message"]
    elif size == LARGEST + 1:
        # nginx lets it pass; the server says what to do.
        assert "--max-request-bytes" in answer.json()["error"]["message"]


def test_health_and_pages_pass(proxy: str) -> None:
    assert httpx.get(f"{proxy}/health").json()["status"] == "ok"
