"""Connections that bring no whole request, clients that read nothing, and clients that are gone."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import MODEL, ApiEngine, PlainTokenizer, serving, wait_until

from localpaged.server import connection as bounds
from localpaged.server.limits import RequestLimits
from localpaged.server.serve import listen

CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
HEAD = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n"
HEAD_TIMEOUT_S = 0.4
LARGE = "0123456789" * 1_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    limits = RequestLimits(body_timeout_s=0.4)
    folder = tmp_path_factory.mktemp("connection")
    with serving(folder, ApiEngine(), limits=limits, head_timeout_s=HEAD_TIMEOUT_S) as address:
        yield address


def connect(server: str) -> socket.socket:
    host, port = server.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read_to_the_end(connection: socket.socket) -> bytes:
    said = b""
    while piece := connection.recv(65536):
        said += piece
    return said


def test_half_a_head_and_then_silence_is_a_408(server: str) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD)
        head, body = read_to_the_end(connection).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert f"Content-Length: {len(body)}".encode() in head


def test_a_connection_that_says_nothing_is_closed(server: str) -> None:
    with connect(server) as connection:
        assert read_to_the_end(connection) == b""


def test_a_head_that_drips_in_is_cut_off_also_after_a_whole_request(server: str) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.append(read_to_the_end(connection)))
        reader.start()
        drip = iter(HEAD + b"X-Slow: " + b"a" * 10_000)
        try:
            while reader.is_alive():
                connection.sendall(bytes([next(drip)]))
                time.sleep(0.02)
        except ConnectionError:
            pass
        reader.join()
    assert b"HTTP/1.1 408" in said[0]


def test_a_body_that_drips_in_is_cut_off(server: str) -> None:
    with connect(server) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode())
        connection.settimeout(0.02)
        said = b""
        while not said:
            connection.sendall(b" ")
            try:
                said = connection.recv(65536)
            except TimeoutError:
                continue
    assert said.startswith(b"HTTP/1.1 408")


def test_an_answer_may_take_longer_than_a_head(tmp_path: Path) -> None:
    engine = ApiEngine()
    with serving(tmp_path, engine, head_timeout_s=HEAD_TIMEOUT_S) as server, httpx.Client(timeout=20) as client:
        # Again on the same connection.
        for _ in range(2):
            hold = engine.hold = asyncio.Event()
            with client.stream("POST", f"{server}/v1/chat/completions", json=CHAT | {"stream": True}) as response:
                lines = response.iter_lines()
                next(lines)
                time.sleep(2 * HEAD_TIMEOUT_S)
                hold.set()
                assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/nothing"])
def test_a_refusal_arrives_though_the_body_is_still_on_its_way(tmp_path: Path, path: str) -> None:
    num_bytes = 5_000_000
    with (
        serving(tmp_path, ApiEngine(), limits=RequestLimits(max_body_bytes=1000), api_key="a key") as server,
        connect(server) as connection,
    ):
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {num_bytes}\r\n\r\n"
        connection.sendall(head.encode() + b"x" * 100_000)
        # The answer is there before the body is.
        said = connection.recv(65536)
        assert said.startswith(b"HTTP/1.1 401")
        connection.sendall(b"x" * (num_bytes - 100_000))
        assert b"invalid_api_key" in said + read_to_the_end(connection)


def test_silent_connections_keep_nobody_out(server: str) -> None:
    silent = [connect(server) for _ in range(100)]
    try:
        for place, connection in enumerate(silent):
            connection.sendall(HEAD[: place % len(HEAD)])
        assert httpx.post(f"{server}/v1/chat/completions", json=CHAT).status_code == 200
    finally:
        for connection in silent:
            connection.close()


def test_the_kernel_watches_whether_clients_are_there_and_read() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                timeout_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert timeout_ms == bounds.UNREAD_TIMEOUT_S * 1000
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == bounds.KEEPALIVE_IDLE_S


class LargeTokenizer(PlainTokenizer):
    """Quick at large pieces of text: one id each."""

    def encode(self, text: str) -> list[int]:
        return [65] if len(text) > 1000 else super().encode(text)


def large_engine() -> ApiEngine:
    """Answers with more than any buffer on the way holds."""
    engine = ApiEngine(answer=lambda *_: LARGE, chars_per_token=100_000)
    engine.tokenizer = LargeTokenizer()
    return engine


class Reader:
    """A client that asks for a stream and reads nothing of it until it is told to."""

    def __init__(self, server: str, body: dict[str, Any]) -> None:
        self.connection = socket.socket()
        # Little fits on the way, so that the server has to wait.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.removeprefix("http://").split(":")
        self.connection.connect((host, int(port)))
        content = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        self.connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)


def test_a_client_that_reads_nothing_holds_up_nobody_and_gets_everything_later(tmp_path: Path) -> None:
    engine = large_engine()
    with serving(tmp_path, engine) as server:
        slow = Reader(server, CHAT | {"stream": True})
        wait_until(lambda: engine.ended == 1)
        for _ in range(3):
            assert httpx.post(f"{server}/v1/chat/completions", json=CHAT | {"max_tokens": 1}).status_code == 200
        with slow.connection as connection:
            connection.settimeout(20)
            said = read_to_the_end(connection)
    lines = [line[6:] for line in said.splitlines() if line.startswith(b"data: {")]
    found = "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)
    assert found == LARGE and b"data: [DONE]" in said


def test_a_client_that_reads_nothing_and_leaves_gives_its_place_back(tmp_path: Path) -> None:
    engine = large_engine()
    with serving(tmp_path, engine, limits=RequestLimits(max_requests=1)) as server:
        slow = Reader(server, CHAT | {"stream": True})
        wait_until(lambda: engine.ended == 1)
        # Its answer is still on the way.
        assert httpx.post(f"{server}/v1/chat/completions", json=CHAT | {"max_tokens": 1}).status_code == 429
        slow.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        slow.connection.close()
        asked = CHAT | {"max_tokens": 1}
        wait_until(lambda: httpx.post(f"{server}/v1/chat/completions", json=asked).status_code == 200)
