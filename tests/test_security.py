"""Who is let in, who is refused, and what a page may do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, FakeTokenizer
from fastapi import FastAPI
from starlette.responses import HTMLResponse
from starlette.testclient import TestClient

from localpaged.errors import SettingError
from localpaged.server import login
from localpaged.server.access import Access, check_bind
from localpaged.server.app import AppSettings, Page, create_app
from localpaged.store.store import Store

KEY = "a key of some length"
HTML = "<html><head><meta property='og:image' content='x'></head><body class=b><script>1</script></body></html>"


@contextmanager
def client_on(folder: Path, base_url: str = "http://127.0.0.1:7860", **access: Any) -> Iterator[TestClient]:
    def mount(app: FastAPI) -> None:
        @app.get("/")
        async def root() -> HTMLResponse:
            return HTMLResponse(HTML.replace("'", '"'))

    page = Page(folder, "<title>ours</title>", "<div id=boot></div>", mount)
    app = create_app(FakeEngine(), Store(folder / "chats.db"), FakeTokenizer, AppSettings(Access(**access)), page)
    with TestClient(app, base_url=base_url, follow_redirects=False) as client:
        yield client


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.1", "LOCALHOST"])
def test_loopback_needs_no_key(host: str) -> None:
    check_bind(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_any_other_address_needs_a_key(host: str) -> None:
    with pytest.raises(SettingError, match="--api-key"):
        check_bind(host, None)
    with pytest.raises(SettingError):
        check_bind(host, "")
    check_bind(host, KEY)


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost", "localhost:99", "[::1]:7860", "chat.localhost"])
def test_names_of_this_machine_are_answered(tmp_path: Path, host: str) -> None:
    with client_on(tmp_path) as client:
        assert client.get("/api/state", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "192.168.1.5", "", "a@127.0.0.1", "[::1"]
)
def test_foreign_names_are_refused_so_dns_rebinding_fails(tmp_path: Path, host: str) -> None:
    with client_on(tmp_path) as client:
        for path in ("/", "/api/state", "/health", "/v1/models"):
            refused = client.get(path, headers={"host": host})
            assert refused.status_code == 400
            assert "--allowed-host" in refused.json()["error"]["message"]


def test_a_configured_name_is_answered(tmp_path: Path) -> None:
    with client_on(tmp_path, allowed_hosts=frozenset({"chat.home"})) as client:
        assert client.get("/api/state", headers={"host": "chat.home:7860"}).status_code == 200


def test_beyond_loopback_addresses_are_answered_and_unknown_names_are_not(tmp_path: Path) -> None:
    with client_on(tmp_path, bind_host="0.0.0.0", api_key=KEY) as client:
        assert client.get("/health", headers={"host": "192.168.1.5:7860"}).status_code in (200, 503)
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1:7860.evil.example"},
    ],
)
def test_other_sites_cannot_change_anything_or_read_the_stream(tmp_path: Path, headers: dict[str, str]) -> None:
    with client_on(tmp_path) as client:
        refused = client.post("/api/conversations", json={}, headers=headers)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "origin"
        stream = {**headers, "accept": "text/event-stream"}
        assert client.get("/api/jobs/x/events", headers=stream).status_code == 403
        assert client.get("/api/conversations").json()["total"] == 0


def test_our_own_page_and_programs_without_origin_are_let_through(tmp_path: Path) -> None:
    with client_on(tmp_path) as client:
        ours = {"origin": "http://127.0.0.1:7860", "sec-fetch-site": "same-origin"}
        assert client.post("/api/conversations", json={}, headers=ours).status_code == 201
        assert client.post("/api/conversations", json={}).status_code == 201


def test_a_link_from_another_site_opens_the_page(tmp_path: Path) -> None:
    with client_on(tmp_path) as client:
        headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "accept": "text/html"}
        assert client.get("/", headers=headers).status_code == 200


def test_a_configured_origin_may_call_and_no_other_gets_cors_headers(tmp_path: Path) -> None:
    with client_on(tmp_path, allowed_origins=frozenset({"https://ide.example"})) as client:
        ask = {"origin": "https://ide.example", "access-control-request-method": "POST"}
        assert client.options("/api/conversations", headers=ask).status_code == 200
        answer = client.post("/api/conversations", json={}, headers={"origin": "https://ide.example"})
        assert answer.status_code == 201
        assert answer.headers["access-control-allow-origin"] == "https://ide.example"
        other = client.get("/api/state", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_without_the_key_only_health_and_the_login_page_answer(tmp_path: Path) -> None:
    with client_on(tmp_path, api_key=KEY) as client:
        assert client.get("/health").status_code in (200, 503)
        for path in ("/api/state", "/api/conversations", "/v1/models", "/metrics", "/", "/gradio_api/info"):
            refused = client.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        page = client.get("/", headers={"accept": "text/html"})
        assert (page.status_code, page.headers["location"]) == (303, "/login")


@pytest.mark.parametrize("header", ["Bearer wrong", "Bearer", KEY, "Basic " + KEY, "Bearer é"])
def test_a_wrong_key_is_refused(tmp_path: Path, header: str) -> None:
    with client_on(tmp_path, api_key=KEY) as client:
        headers = {"authorization": header.encode()}
        assert client.get("/api/state", headers=headers).status_code == 401  # type: ignore[arg-type]


def test_the_key_as_a_bearer_token_lets_programs_in(tmp_path: Path) -> None:
    with client_on(tmp_path, api_key=KEY) as client:
        assert client.get("/api/state", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


def test_logging_in_sets_a_strict_cookie_that_is_not_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "FAILURE_DELAY_S", 0)
    with client_on(tmp_path, api_key=KEY) as client:
        assert client.post("/login", data={"key": "wrong"}).status_code == 401
        assert client.get("/api/state").status_code == 401
        answer = client.post("/login", data={"key": KEY})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie and KEY not in cookie
        state = client.get("/api/state").json()
        assert (state["user"], state["needs_login"]) == ("", True)
    with client_on(tmp_path, api_key="another key") as other:
        other.cookies.update(client.cookies)
        assert other.get("/api/state").status_code == 401


def test_every_response_forbids_what_a_page_does_not_need(tmp_path: Path) -> None:
    with client_on(tmp_path) as client:
        for path in ("/", "/api/state", "/nothing-here"):
            headers = client.get(path).headers
            policy = headers["content-security-policy"]
            assert "img-src 'self' data: blob:;" in policy and "connect-src 'self';" in policy
            assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]
            assert "frame-ancestors 'none'" in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "same-origin"


def test_the_page_gets_our_head_and_a_fresh_nonce_on_its_scripts(tmp_path: Path) -> None:
    with client_on(tmp_path) as client:
        nonces = set()
        for _ in range(2):
            page = client.get("/", headers={"accept": "text/html"})
            match = re.search(r'<script nonce="([\w-]{20,})">1</script>', page.text)
            assert match and f"'nonce-{match.group(1)}'" in page.headers["content-security-policy"]
            assert "<title>ours</title></head>" in page.text
            assert "<body class=b><div id=boot></div>" in page.text
            assert "og:image" not in page.text
            nonces.add(match.group(1))
        assert len(nonces) == 2
