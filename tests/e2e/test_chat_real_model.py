"""The whole product in a browser: the real server, the real engine, the embedded model."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from chat_page import ANSWER_TIMEOUT_MS, ask, cards, overflowing, wait_for_choice, wait_for_quiet, wait_for_text
from playwright.sync_api import Page, expect
from server_process import ServerProcess, real

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LONG = "Tell me a long story about a lighthouse keeper and the sea, with many details."


def test_ask_with_four_answers_choose_one_and_go_on(open_page: Callable[..., Page], real_server: ServerProcess) -> None:
    page = open_page(real_server.url)
    expect(page.locator(".lp-chip")).to_contain_text("SmolLM2-135M-Instruct")
    expect(page.locator(".lp-empty")).to_contain_text("is very small")
    ask(page, "Name three things that float on water.", answers=4)
    wait_for_text(page, 4)
    wait_for_choice(page)
    for place in range(4):
        expect(cards(page).nth(place).locator(".lp-card-numbers")).to_have_text(
            re.compile(r"\d+ tok · [\d.]+ tok/s\s*first [\d.]+ m?s")
        )
        expect(cards(page).nth(place).locator(".lp-card-blocks")).to_have_text(
            re.compile(r"\d+ blocks shared · \d+ own")
        )
    second = cards(page).nth(1).locator(".lp-card-body").inner_text()
    page.keyboard.press("2")
    expect(page.locator(".lp-deck")).to_have_count(0)
    expect(page.locator(".lp-turn.assistant .lp-md")).to_have_text(second, use_inner_text=True)
    expect(page.locator(".lp-switch")).to_contain_text("2 / 4")
    ask(page, "Which of them is the heaviest?", answers=1)
    wait_for_quiet(page)
    reused = page.locator(".lp-turn.user").nth(1).locator(".lp-meta")
    expect(reused).to_contain_text(re.compile(r"[1-9]\d* tokens reused, \d+ computed"))
    expect(page.locator(".lp-turn")).to_have_count(4)
    page.reload()
    expect(page.locator(".lp-turn")).to_have_count(4)
    expect(page.locator(".lp-switch").first).to_contain_text("2 / 4")
    assert overflowing(page) == []


def test_stop_one_and_stop_all_keep_what_was_written(
    open_page: Callable[..., Page], real_server: ServerProcess
) -> None:
    page = open_page(real_server.url)
    ask(page, LONG, answers=3)
    wait_for_text(page, 3)
    cards(page).nth(1).get_by_role("button", name="Stop").click()
    expect(cards(page).nth(1).locator(".lp-card-state")).to_have_text("stopped")
    expect(cards(page).nth(0).locator(".lp-card-state")).to_have_text("decoding")
    page.get_by_role("button", name="Stop all").click()
    wait_for_choice(page)
    texts = [cards(page).nth(place).locator(".lp-card-body").inner_text() for place in range(3)]
    assert all(texts)
    page.keyboard.press("1")
    expect(page.locator(".lp-turn.assistant .lp-meta")).to_contain_text("stopped")
    before = page.locator(".lp-turn.assistant .lp-md").inner_text()
    page.get_by_role("button", name="Continue").click()
    # To its own end, or to that of the window.
    ended = page.locator(".lp-turn.assistant .lp-meta-end")
    expect(ended).not_to_contain_text("stopped", timeout=ANSWER_TIMEOUT_MS)
    expect(ended).to_contain_text("tokens")
    expect(page.locator(".lp-turn.assistant .lp-md")).to_contain_text(before[:40])


def test_a_reload_in_the_middle_goes_on_where_it_was(
    open_page: Callable[..., Page], real_server: ServerProcess
) -> None:
    page = open_page(real_server.url)
    ask(page, LONG, answers=2)
    wait_for_text(page, 2)
    page.reload()
    wait_for_text(page, 2)
    before = len(cards(page).nth(0).locator(".lp-card-body").inner_text())
    page.wait_for_function(
        f"document.querySelector('.lp-card-body')?.innerText.length > {before + 20}", timeout=ANSWER_TIMEOUT_MS
    )
    page.get_by_role("button", name="Stop", exact=True).last.click()
    wait_for_choice(page)


def test_a_closed_tab_loses_nothing(open_page: Callable[..., Page], real_server: ServerProcess) -> None:
    page = open_page(real_server.url)
    ask(page, "Say hello in one word.", answers=2)
    expect(page).to_have_url(re.compile(r"#/c/\d+"))
    address = page.url
    page.close()
    again = open_page(address)
    wait_for_text(again, 2)
    wait_for_choice(again)


def test_an_engine_that_is_killed_is_reported_and_the_next_message_works(
    open_page: Callable[..., Page], real_server: ServerProcess, faults: list[str]
) -> None:
    page = open_page(real_server.url)
    ask(page, LONG, answers=2)
    wait_for_text(page, 2)
    for child in psutil.Process(real_server.pid).children(recursive=True):
        if "localpaged.engine.process" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)
    expect(page.locator(".lp-problem")).to_contain_text("What was shown is kept", timeout=ANSWER_TIMEOUT_MS)
    wait_for_choice(page)
    assert all(page.locator(".lp-card-body").all_inner_texts())
    page.get_by_role("button", name="Regenerate").click()
    # Not the answers that are still on screen: the new ones, once the engine is there again.
    expect(page.locator(".lp-card[data-state=decoding]")).to_have_count(2, timeout=ANSWER_TIMEOUT_MS)
    wait_for_text(page, 2)
    page.get_by_role("button", name="Stop", exact=True).last.click()
    wait_for_choice(page)
    expect(page.locator(".lp-card[data-state=error]")).to_have_count(0)
    faults.clear()  # The browser reports each question about the pool that no engine was there to answer.


def test_a_server_that_is_started_again_finds_everything(
    open_page: Callable[..., Page], run: Callable[..., ServerProcess], tmp_path: Path, faults: list[str]
) -> None:
    server = run(real(tmp_path, "--max-model-len", "384"))
    page = open_page(server.url)
    ask(page, "Say hello.", answers=2)
    wait_for_text(page, 2)
    wait_for_choice(page)
    page.keyboard.press("2")
    expect(page.locator(".lp-switch")).to_contain_text("2 / 2")
    answer = page.locator(".lp-turn.assistant .lp-md").inner_text()
    ask(page, LONG, answers=1)
    wait_for_text(page, 1)
    page.wait_for_timeout(1500)
    server.stop(signal.SIGKILL)
    expect(page.locator(".lp-banner")).to_contain_text("cannot be reached", timeout=30_000)
    server.start()
    expect(page.locator(".lp-banner")).to_be_hidden(timeout=60_000)
    expect(page.locator(".lp-problem")).to_contain_text("stopped while this was being written")
    page.reload()
    expect(page.locator(".lp-turn")).to_have_count(4)
    expect(page.locator(".lp-turn.assistant .lp-md").first).to_have_text(answer, use_inner_text=True)
    expect(page.locator(".lp-switch").first).to_contain_text("2 / 2")
    page.close()
    faults.clear()  # The browser reports each request that the stopped server did not answer.
