"""A browser, and pages that report what should never happen: console errors, requests to elsewhere."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from server_process import ServerProcess, real, scripted

ROOT = Path(__file__).parent.parent.parent
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


# Other work may keep the machine busy.
expect.set_options(timeout=20_000)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    command = [sys.executable, str(ROOT / "scripts" / "find_program.py"), "chromium"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        # Under plain pytest only: `make test` installs a browser first, and fails where it cannot. -ra shows why.
        pytest.skip(found.stderr.strip())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found.stdout.strip(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # A short window keeps the answers short.
    server = real(tmp_path_factory.mktemp("real"), "--max-model-len", "384").start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = scripted(tmp_path_factory.mktemp("fake")).start()
    yield server
    server.stop()


@pytest.fixture
def run() -> Iterator[Callable[..., ServerProcess]]:
    """Start a server that lasts as long as the test and its pages."""
    servers: list[ServerProcess] = []

    def start(server: ServerProcess, until: int = 200) -> ServerProcess:
        servers.append(server)
        return server.start(until)

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def faults() -> list[str]:
    """What pages reported; a test that provokes some clears them."""
    return []


@pytest.fixture
def open_page(browser: Browser, faults: list[str], run: Callable[..., ServerProcess]) -> Iterator[Callable[..., Page]]:
    """Open a URL in a fresh profile and wait for the chat. At the end nothing may have been reported."""
    contexts = []

    def open_url(url: str, width: int = 1440, height: int = 900, ready: str = ".lp-frame", **options: object) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        origin = "/".join(url.split("/")[:3])
        page.on("console", lambda entry: entry.type == "error" and faults.append(f"console: {entry.text}"))
        page.on("pageerror", lambda error: faults.append(f"page: {error}"))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((origin, "data:", "blob:")) or faults.append(f"request: {request.url}")
            ),
        )
        page.goto(url)
        page.wait_for_selector(ready)
        return page

    yield open_url
    for context in contexts:
        context.close()
    assert faults == []
