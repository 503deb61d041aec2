"""The chat page where another server answers: it works, and shows nothing that is not known."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_page import ask, cards, overflowing, wait_for_choice, wait_for_quiet
from playwright.sync_api import Page, expect
from server_process import ServerProcess, remote, scripted

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def other(run: Callable[..., ServerProcess], tmp_path: Path) -> ServerProcess:
    """Our own server on the scripted engine, to be asked by another."""
    folder = tmp_path / "other"
    folder.mkdir()
    return run(scripted(folder))


def test_candidates_of_another_server_are_compared_and_what_it_does_not_tell_has_no_place(
    open_page: Callable[..., Page], run: Callable[..., ServerProcess], other: ServerProcess, tmp_path: Path
) -> None:
    server = run(remote(tmp_path, other.url))
    page = open_page(server.url)
    expect(page.locator(".lp-chip")).to_have_text(f"fake-135M · 127.0.0.1:{other.port}")
    expect(page.locator(".lp-empty")).not_to_contain_text("share the memory")
    ask(page, "Names, please", answers=4)
    wait_for_choice(page)
    expect(cards(page)).to_have_count(4)
    expect(cards(page).first.locator(".lp-card-body")).to_contain_text("The Lamp Room.")
    for absent in (".lp-meter", ".lp-share", ".lp-card-blocks"):
        assert page.locator(absent).evaluate_all("(found) => found.every((one) => !one.offsetParent)"), absent
    expect(page.locator(".lp-price")).to_have_text("")
    expect(page.locator(".lp-summary b")).to_have_text("4 answers")
    page.get_by_role("tab", name="KV memory").click()
    expect(page.locator(".lp-big")).to_have_text("On another server")
    expect(page.locator(".lp-kv-panel")).to_contain_text(f"{other.url}/v1 keeps its KV memory itself")
    expect(page.locator(".lp-kv-panel")).to_contain_text("First token")
    assert overflowing(page) == []
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/remote.png")
    page.locator(".lp-write").focus()
    page.keyboard.press("2")
    expect(page.locator(".lp-switch")).to_contain_text("2 / 4")
    page.get_by_label("Message", exact=True).fill("slow")
    page.get_by_label("How many answers").select_option("1")
    page.keyboard.press("Enter")
    expect(page.locator(".lp-deck-frame.solo .lp-card-body")).to_have_text(re.compile(r"\S"))
    page.get_by_role("button", name="Stop", exact=True).click()
    wait_for_quiet(page)
    last = page.locator(".lp-turn.assistant").last
    expect(last.get_by_role("button", name="Regenerate")).to_be_visible()
    expect(last.locator(".lp-meta-end")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)


def test_a_server_that_is_away_is_said_on_the_page_and_its_coming_noticed(
    open_page: Callable[..., Page], run: Callable[..., ServerProcess], other: ServerProcess, tmp_path: Path
) -> None:
    other.stop()
    server = run(remote(tmp_path, other.url), until=503)
    page = open_page(server.url)
    expect(page.locator(".lp-empty")).to_contain_text("There is no server to answer.")
    expect(page.locator(".lp-empty")).to_contain_text(f"{other.url}/v1 cannot be reached")
    expect(page.locator(".lp-chip.bad")).to_have_text("Server not there")
    other.start()
    expect(page.locator(".lp-chip")).to_have_text(f"fake-135M · 127.0.0.1:{other.port}", timeout=20_000)
    ask(page, "Are you there?", answers=2)
    wait_for_choice(page)
