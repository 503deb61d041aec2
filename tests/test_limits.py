"""Requests that are too large, too slow or too many are refused with the status that says so, and cost nothing."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from api_server import MODEL, ApiEngine, serving, wait_until

from localpaged.server.limits import RequestLimits

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    limits = RequestLimits(max_body_bytes=4000, body_timeout_s=0.3)
    with serving(tmp_path_factory.mktemp("limits"), ApiEngine(), limits=limits) as address:
        yield address


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_body_that_is_too_large_is_a_413_in_the_path_s_own_shape(server: str, path: str) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": "x" * 5000}]}
    answer = httpx.post(f"{server}{path}", json=body)
    assert answer.status_code == 413
    assert "--max-request-bytes" in str(answer.json()["error"])
    assert httpx.post(f"{server}/v1/chat/completions", json=CHAT).status_code == 200


def test_a_page_of_an_allowed_site_can_read_the_refusal(tmp_path: Path) -> None:
    site = "https://app.example"
    with serving(
        tmp_path, ApiEngine(), limits=RequestLimits(max_body_bytes=10), allowed_origins=frozenset({site})
    ) as server:
        answer = httpx.post(f"{server}/v1/chat/completions", json=CHAT, headers={"Origin": site})
    assert answer.status_code == 413
    assert answer.headers["Access-Control-Allow-Origin"] == site


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_body_that_is_not_sent_as_json_is_told_how(server: str, path: str) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{server}{path}", content=b'{"model": "x"}', headers=form)
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_a_body_without_a_length_is_counted_as_it_comes(server: str) -> None:
    pieces = (b"x" * 1000 for _ in range(6))
    answer = httpx.post(f"{server}/v1/chat/completions", content=pieces, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_a_body_that_does_not_come_is_a_408(server: str) -> None:
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f'{head}Content-Length: 100\r\n\r\n{{"model": '.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_more_requests_than_may_wait_are_a_429_with_a_time_to_come_back(tmp_path: Path) -> None:
    engine = ApiEngine()
    engine.hold = asyncio.Event()
    body = CHAT | {"stream": True}
    with serving(tmp_path, engine, limits=RequestLimits(max_requests=2)) as server:
        url = f"{server}/v1/chat/completions"
        with (
            httpx.Client(timeout=10) as client,
            client.stream("POST", url, json=body),
            client.stream("POST", url, json=body),
        ):
            refused = httpx.post(url, json=CHAT)
            assert refused.status_code == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert "busy" in refused.json()["error"]["message"]
            # Other paths are not held up.
            assert httpx.get(f"{server}/v1/models").status_code == 200
        wait_until(lambda: engine.closed == 2)
        engine.hold = None
        assert httpx.post(url, json=CHAT).status_code == 200
