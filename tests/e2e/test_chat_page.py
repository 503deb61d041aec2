"""The chat page on the scripted engine: what is rare, hostile, wide, or takes many clicks."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_page import ask, cards, command, overflowing, wait_for_choice, wait_for_quiet, wait_for_text
from playwright.sync_api import Page, expect
from server_process import ServerProcess, scripted

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_hostile_markdown_runs_nothing_and_loads_nothing(
    open_page: Callable[..., Page], fake_server: ServerProcess
) -> None:
    page = open_page(fake_server.url)
    ask(page, "hostile", answers=2)
    wait_for_choice(page)
    page.keyboard.press("1")
    answer = page.locator(".lp-turn.assistant .lp-md")
    expect(answer).to_contain_text("<script>window.hacked = 1</script>")
    expect(answer).to_contain_text("It costs $5, or $8 for two.")
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    assert answer.locator("img, script, iframe, svg, [onerror], [onload], [onclick]").count() == 0
    links = answer.locator("a").evaluate_all("(links) => links.map((link) => [link.href, link.rel])")
    assert all(href.startswith("https://example.org/") or href == "" for href, _ in links)
    assert all("noopener" in rel for href, rel in links)


def test_markup_put_into_the_page_by_force_is_stopped_by_the_policy(
    open_page: Callable[..., Page], fake_server: ServerProcess, faults: list[str]
) -> None:
    page = open_page(fake_server.url)
    page.evaluate(
        """document.querySelector(".lp-thread").innerHTML =
           '<img src="x:" onerror="window.hacked = 1"><img src="https://example.org/spy.png">'"""
    )
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    assert any("violates the following Content Security Policy" in fault for fault in faults)
    faults.clear()


def test_wide_content_stays_in_its_place(open_page: Callable[..., Page], fake_server: ServerProcess) -> None:
    """The same conversation on a telephone, a tablet and a desk; the empty page and the asking on the first."""
    sizes = [(390, 844), (1024, 768), (1440, 900)]
    page = open_page(fake_server.url, *sizes[0], color_scheme="light")
    for width, height in reversed(sizes):
        page.set_viewport_size({"width": width, "height": height})
        page.reload()
        page.wait_for_selector(".lp-frame")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        assert overflowing(page) == []
    # On the telephone the empty page begins at its beginning, and no note is squeezed to a letter a line.
    expect(page.locator(".lp-empty h2")).to_be_in_viewport()
    for note in page.locator(".lp-command span").all():
        box = note.bounding_box()
        assert box is not None and box["width"] > box["height"]
    ask(page, "wide " + "w" * 500, answers=4)
    wait_for_choice(page)
    for width, height in sizes:
        page.set_viewport_size({"width": width, "height": height})
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            page.reload()
            expect(page.locator(".lp-deck.open")).to_be_visible()
            assert page.evaluate("document.documentElement.dataset.theme") == theme
            assert overflowing(page) == [], (width, theme)
        cards(page).nth(0).get_by_role("button", name="Choose").click()
        expect(page.locator(".lp-deck")).to_have_count(0)
        assert overflowing(page) == [], width
        page.get_by_role("button", name="Compare").click()
        wait_for_choice(page)


def test_text_from_right_to_left_gets_its_direction(open_page: Callable[..., Page], fake_server: ServerProcess) -> None:
    page = open_page(fake_server.url)
    ask(page, "wide", answers=1)
    wait_for_quiet(page)
    hebrew = page.locator(".lp-turn.assistant p", has_text="שלום")
    assert hebrew.evaluate("(element) => getComputedStyle(element).direction") == "rtl"


def test_editing_regenerating_and_switching_move_between_branches(
    open_page: Callable[..., Page], fake_server: ServerProcess
) -> None:
    page = open_page(fake_server.url)
    ask(page, "A frist question", answers=1)
    wait_for_quiet(page)
    page.locator(".lp-turn.user").hover()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("A first question")
    page.keyboard.press("Enter")
    expect(page.locator(".lp-user")).to_have_text("A first question")
    wait_for_quiet(page)
    expect(page.locator(".lp-turn.user .lp-switch")).to_contain_text("2 / 2")
    page.get_by_label("How many answers").select_option("3")
    page.get_by_role("button", name="Regenerate").click()
    wait_for_choice(page)
    expect(cards(page)).to_have_count(3)
    page.get_by_role("button", name="Show 1 earlier answer").click()
    expect(cards(page)).to_have_count(4)
    page.keyboard.press("3")
    expect(page.locator(".lp-turn.assistant .lp-switch")).to_contain_text("3 / 4")
    page.get_by_role("button", name="Next answer").click()
    expect(page.locator(".lp-turn.assistant .lp-switch")).to_contain_text("4 / 4")
    page.get_by_role("button", name="Compare").click()
    wait_for_choice(page)
    page.keyboard.press("1")
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".lp-user")).to_have_text("A frist question")
    page.reload()
    expect(page.locator(".lp-user")).to_have_text("A frist question")


def test_sending_before_choosing_asks_for_the_choice_and_keeps_the_draft(
    open_page: Callable[..., Page], fake_server: ServerProcess
) -> None:
    page = open_page(fake_server.url)
    ask(page, "Names, please", answers=4)
    wait_for_choice(page)
    page.get_by_label("Message", exact=True).fill("4 more of them")
    page.keyboard.press("Enter")
    expect(cards(page).nth(0)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(cards(page).nth(1)).to_be_focused()
    expect(page.locator(".lp-user")).to_have_count(1)
    page.keyboard.press("4")
    expect(page.locator(".lp-switch")).to_contain_text("4 / 4")
    expect(page.get_by_label("Message", exact=True)).to_have_value("4 more of them")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".lp-user").last).to_have_text("4 more of them")


def test_choosing_while_others_are_written_stops_them(
    open_page: Callable[..., Page], fake_server: ServerProcess
) -> None:
    page = open_page(fake_server.url)
    ask(page, "slow", answers=2)
    wait_for_text(page, 2)
    cards(page).nth(1).get_by_role("button", name="Choose").click()
    expect(page.locator(".lp-deck-frame.solo .lp-card-state")).to_have_text("decoding")
    length = "document.querySelector('.lp-card-body').innerText.length"
    page.wait_for_function(f"{length} > {page.evaluate(length) + 20}")  # it goes on being written
    page.get_by_role("button", name="Stop", exact=True).click()
    wait_for_quiet(page)
    expect(page.locator(".lp-turn.assistant .lp-switch")).to_contain_text("2 / 2")


def test_conversations_are_found_renamed_pinned_deleted_and_brought_back(
    open_page: Callable[..., Page], fake_server: ServerProcess
) -> None:
    page = open_page(fake_server.url)
    ask(page, "Where do puffins spend the winter?", answers=1)
    wait_for_quiet(page)
    page.keyboard.press("Control+k")
    page.keyboard.type("puffi")
    row = page.locator(".lp-row")
    expect(row).to_have_count(1)
    command(page, row, "Rename")
    page.get_by_label("Title").fill("Sea birds")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Sea birds")
    expect(page.locator(".lp-hit mark")).to_have_text("puffins")
    command(page, row, "Pin")
    expect(page.locator(".lp-group")).to_have_text("Pinned")
    command(page, row, "Delete")
    expect(row).to_have_count(0)
    expect(page.locator(".lp-empty")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(row).to_have_count(1)
    expect(page.locator(".lp-turn")).to_have_count(2)


def test_parameters_belong_to_the_conversation_and_come_back_with_it(
    open_page: Callable[..., Page], fake_server: ServerProcess
) -> None:
    page = open_page(fake_server.url)
    expect(page.locator("#lp-temperature input[type=number]")).to_have_value("0.8")
    page.locator("#lp-prompt textarea").fill("Answer in one line.")
    temperature = page.locator("#lp-temperature input[type=number]")
    temperature.fill("0.3")
    temperature.press("Tab")
    expect(page.locator(".lp-tools")).to_contain_text("T 0.3")
    ask(page, "One line about the sea", answers=2)
    wait_for_choice(page)
    expect(page.locator(".lp-card-sub").first).to_have_attribute("title", re.compile("temperature 0.3"))
    address = page.url
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#lp-prompt textarea")).to_have_value("")
    # By its title: an answer of an earlier test may end just then and put its conversation first.
    page.locator(".lp-row-open", has_text="One line about the sea").first.click()
    expect(page).to_have_url(address)
    expect(page.locator("#lp-prompt textarea")).to_have_value("Answer in one line.")
    page.reload()
    expect(page.locator("#lp-prompt textarea")).to_have_value("Answer in one line.")
    expect(page.locator("#lp-temperature input[type=number]")).to_have_value("0.3")
    expect(page.locator(".lp-tools")).to_contain_text("T 0.3")


def test_a_draft_outlives_a_reload(open_page: Callable[..., Page], fake_server: ServerProcess) -> None:
    page = open_page(fake_server.url)
    page.get_by_label("Message", exact=True).fill("Half a thou")
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Half a thou")


def test_the_meter_counts_history_and_draft(open_page: Callable[..., Page], fake_server: ServerProcess) -> None:
    page = open_page(fake_server.url)
    page.get_by_label("Message", exact=True).fill("x" * 9000)
    expect(page.locator(".lp-counts")).to_contain_text("tokens too many")
    page.keyboard.press("Enter")
    # On each answer, and then once, when all of them have failed for it.
    expect(page.locator(".lp-problem").first).to_contain_text("the model's window is 8,192")
    expect(page.locator(".lp-user")).to_have_text("x" * 9000)
    expect(page.get_by_role("button", name="Try again")).to_be_visible()


def test_the_end_is_announced_once_and_columns_are_not_live(
    open_page: Callable[..., Page], fake_server: ServerProcess
) -> None:
    page = open_page(fake_server.url)
    ask(page, "Names", answers=3)
    wait_for_choice(page)
    expect(page.locator("#lp-announcer")).to_have_text("3 answers complete.")
    live = page.locator(".lp-main [aria-live]:not([aria-live=off])")
    assert live.count() == 0


def test_a_model_that_loads_is_said_and_a_message_can_wait_for_it(
    open_page: Callable[..., Page], run: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = run(scripted(tmp_path, FAKE_LOAD_S="8"), until=503)
    page = open_page(server.url)
    expect(page.locator(".lp-empty")).to_contain_text("The model is loading")
    expect(page.locator(".lp-chip")).to_have_text("Loading the model…")
    ask(page, "Are you there?", answers=2)
    expect(page.locator(".lp-card-state").first).to_have_text("loading model")
    wait_for_choice(page)
    expect(page.locator(".lp-chip")).to_contain_text("fake-135M")


def test_a_model_that_cannot_be_loaded_is_said_with_the_remedy(
    open_page: Callable[..., Page], run: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    error = "model.gguf is cut off: 40 of 98 MB are there. Fetch it again."
    server = run(scripted(tmp_path, FAKE_LOAD_ERROR=error), until=503)
    page = open_page(server.url)
    expect(page.locator(".lp-empty")).to_contain_text(error)
    expect(page.locator(".lp-chip.bad")).to_have_text("Model stopped")
    ask(page, "Are you there?", answers=2)
    # On each answer, and then once, when all of them have failed for it.
    expect(page.locator(".lp-problem").first).to_have_text(error)


def test_a_server_that_goes_away_is_said_and_its_return_is_noticed(
    open_page: Callable[..., Page], run: Callable[..., ServerProcess], tmp_path: Path, faults: list[str]
) -> None:
    server = run(scripted(tmp_path))
    page = open_page(server.url)
    server.stop(signal.SIGKILL)
    page.get_by_label("Message", exact=True).fill("Do not lose this")
    page.keyboard.press("Enter")
    expect(page.locator(".lp-banner")).to_contain_text("cannot be reached")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Do not lose this")
    server.start()
    expect(page.locator(".lp-banner")).to_be_hidden(timeout=30_000)
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator(".lp-user")).to_have_text("Do not lose this")
    page.close()
    faults.clear()


def test_with_a_key_the_browser_logs_in_first(
    open_page: Callable[..., Page], run: Callable[..., ServerProcess], tmp_path: Path, faults: list[str]
) -> None:
    server = run(scripted(tmp_path, FAKE_API_KEY="open sesame"))
    page = open_page(server.url, ready="form")
    assert page.url.endswith("/login")
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("nobody’s key")
    faults.clear()  # The browser reports the 401.
    page.get_by_label("API key").fill("open sesame")
    page.keyboard.press("Enter")
    page.wait_for_selector(".lp-frame")
    ask(page, "Hello", answers=1)
    wait_for_quiet(page)
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_role("dialog")).to_contain_text("You are logged in with the server’s own key.")
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login")
