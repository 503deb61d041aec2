"""The list of conversations: search, menus, renaming, files in and out; and the title on top."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from chat_page import bring, command, conversation_file, list_instead, overflowing
from playwright.sync_api import Locator, Page, expect
from server_process import ServerProcess

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Open = Callable[..., Page]
CHATGPT = Path(__file__).parent.parent / "data" / "chatgpt_conversations.json"


def search(page: Page, text: str) -> Locator:
    """Look for words, so that other tests' conversations are not in the way; the rows that are found."""
    page.keyboard.press("Control+k")
    page.get_by_label("Search conversations").fill(text)
    expect(page.locator(".lp-row:not(:has(mark))")).to_have_count(0)
    return page.locator(".lp-row")


def test_a_search_shows_several_hits_and_leads_to_them_by_keyboard(open_page: Open, fake_server: ServerProcess) -> None:
    texts = ["Tell me of walruses", "A walrus is large.", "And?", "It swims.", "More", "Many a walrus sings.", "Thanks"]
    filler = [f"line {place}\n" * 9 for place in range(80)]
    bring(fake_server.url, ("Sea beasts", texts + filler), ("The walrus song", ["Sing", "La"]))
    page = open_page(fake_server.url)
    rows = search(page, "walrus")
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="song").locator(".lp-row-title mark")).to_have_text("walrus")
    beasts = rows.filter(has_text="Sea beasts")
    expect(beasts.locator(".lp-hit")).to_have_count(3)
    expect(beasts.locator(".lp-hit mark").first).to_have_text("walrus")
    expect(page.locator("#lp-announcer")).to_have_text("2 conversations found")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".lp-row-open").first).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Search conversations")).to_be_focused()
    # The second hit is far above the window that is shown first.
    first = page.locator(".lp-row-open, .lp-hit").all_inner_texts().index("A walrus is large.")
    for _ in range(first + 1):
        page.keyboard.press("ArrowDown")
    expect(beasts.locator(".lp-hit", has_text="A walrus is large.")).to_be_focused()
    page.keyboard.press("Enter")
    found = page.locator(".lp-turn.lp-found")
    expect(found).to_have_text(re.compile("A walrus is large"))
    expect(found).to_be_in_viewport()
    rows = search(page, "walrus song")
    expect(rows).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("The walrus song")
    rows = search(page, "no such word anywhere")
    expect(page.locator(".lp-none")).to_contain_text("Nothing matches “no such word anywhere”.")
    page.get_by_role("button", name="Clear the search").click()
    expect(page.get_by_label("Search conversations")).to_have_value("")
    expect(rows.first).to_be_visible()


def test_a_hit_on_another_branch_brings_that_branch_up(open_page: Open, fake_server: ServerProcess) -> None:
    file = json.loads(conversation_file(("Horns", ["Which beasts have horns?", "Goats.", "Narwhals, in a way."])))
    question, _, other = file["conversations"][0]["messages"]
    question["chosen_child"] = 2
    other |= {"parent": 1, "role": "assistant"}
    (conversation,) = httpx.post(f"{fake_server.url}/api/import", content=json.dumps(file)).json()["imported"]
    page = open_page(f"{fake_server.url}/#/c/{conversation}")
    answer = page.locator(".lp-turn.assistant .lp-md")
    expect(answer).to_have_text("Goats.")
    expect(search(page, "narwhals")).to_have_count(1)
    page.locator(".lp-hit").click()
    expect(answer).to_have_text("Narwhals, in a way.")
    expect(page.locator(".lp-switch")).to_contain_text("2 / 2")


def test_the_menu_of_a_row_opens_by_mouse_and_keyboard_and_gives_the_focus_back(
    open_page: Open, fake_server: ServerProcess
) -> None:
    (conversation,) = bring(fake_server.url, ("Quince jam", ["How?", "Slowly."]))
    page = open_page(fake_server.url)
    row = search(page, "quince")
    expect(row).to_have_count(1)
    row.click(button="right")
    menu = page.get_by_role("menu")
    items = ["Rename", "Pin", "Archive", "Duplicate", "Export as JSON", "Export as Markdown", "Delete"]
    expect(menu.get_by_role("menuitem")).to_have_text(items)
    page.mouse.click(800, 500)
    expect(menu).to_have_count(0)
    row.locator(".lp-row-open").focus()
    page.keyboard.press("ArrowRight")
    expect(row.get_by_role("button", name="More: Quince jam")).to_be_focused()
    page.keyboard.press("Enter")
    expect(menu.get_by_role("menuitem", name="Rename")).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(menu.get_by_role("menuitem", name="Delete")).to_be_focused()
    page.keyboard.press("d")
    expect(menu.get_by_role("menuitem", name="Duplicate")).to_be_focused()
    assert overflowing(page) == []
    page.keyboard.press("Escape")
    expect(menu).to_have_count(0)
    expect(row.get_by_role("button", name="More: Quince jam")).to_be_focused()
    page.keyboard.press("Shift+F10")
    expect(menu).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("F2")
    page.keyboard.type("Never mind")
    page.keyboard.press("Escape")
    expect(row.locator(".lp-row-open")).to_have_text("Quince jam")
    expect(row.locator(".lp-row-open")).to_be_focused()
    page.keyboard.press("F2")
    page.get_by_label("Title").fill("Quince jelly")
    page.keyboard.press("Enter")
    expect(row.locator(".lp-row-title")).to_have_text("Quince jelly")
    expect(row.locator(".lp-row-open")).to_be_focused()
    # The list is drawn anew with what came meanwhile, and the focus stays.
    httpx.patch(f"{fake_server.url}/api/conversations/{conversation}", json={"title": "Quince cheese"})
    page.evaluate("dispatchEvent(new Event('focus'))")
    expect(row.locator(".lp-row-title")).to_have_text("Quince cheese")
    expect(row.locator(".lp-row-open")).to_be_focused()
    page.keyboard.press("Delete")
    expect(row).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(row).to_have_count(1)


def test_archived_conversations_are_folded_away_and_come_back(open_page: Open, fake_server: ServerProcess) -> None:
    bring(fake_server.url, ("Old plans", ["Plan", "Done."]), pinned=True)
    page = open_page(fake_server.url)
    row = page.locator(".lp-row", has_text="Old plans")
    expect(page.locator("section", has=page.locator("#lp-group-pinned")).locator(row)).to_have_count(1)
    command(page, row, "Archive")
    expect(row).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#lp-group-pinned-rows").locator(row)).to_have_count(1)
    command(page, row, "Archive")
    fold = page.get_by_role("button", name=re.compile("^Archived"))
    expect(fold).to_have_attribute("aria-expanded", "false")
    fold.click()
    expect(fold).to_have_attribute("aria-expanded", "true")
    expect(page.locator("#lp-group-archived-rows").locator(row)).to_be_visible()
    fold.click()
    expect(row).to_have_count(0)
    # A search finds it without unfolding anything.
    expect(search(page, "old plans")).to_have_count(1)
    command(page, row, "Take out of the archive")
    page.get_by_label("Search conversations").press("Escape")
    expect(page.locator(".lp-rows section:not(:has(#lp-group-archived))").locator(row)).to_be_visible()


def test_a_conversation_is_duplicated_exported_and_imported(
    open_page: Open, fake_server: ServerProcess, tmp_path: Path
) -> None:
    bring(fake_server.url, ("Kelp soup", ["Recipe?", "Boil it."]))
    page = open_page(fake_server.url)
    rows = search(page, "kelp")
    command(page, rows.first, "Duplicate")
    expect(page.locator("h1")).to_have_text("Kelp soup (copy)")
    expect(rows).to_have_count(2)
    original = rows.filter(has_not_text="copy")
    with page.expect_download() as download:
        command(page, original, "Export as Markdown")
    assert download.value.suggested_filename == "Kelp soup.md"
    assert "Boil it." in download.value.path().read_text()
    with page.expect_download() as download:
        command(page, original, "Export as JSON")
    file = tmp_path / "Kelp soup.json"
    download.value.save_as(file)
    assert json.loads(file.read_text())["conversations"][0]["title"] == "Kelp soup"
    page.get_by_role("button", name="Import and export").click()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("menuitem", name="Import a file").click()
    chooser.value.set_files(file)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("1 conversation came in.")
    expect(dialog).to_contain_text("Nothing was left out.")
    dialog.get_by_role("button", name="Open the latest").click()
    expect(page.locator(".lp-turn")).to_have_count(2)
    expect(rows).to_have_count(3)
    page.get_by_role("button", name="Import and export").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="Export all as JSON").click()
    assert download.value.suggested_filename == "localpaged.json"


DROP = """([text, name]) => {
  const carried = new DataTransfer();
  carried.items.add(new File([text], name));
  const list = document.querySelector(".lp-left");
  const how = {dataTransfer: carried, bubbles: true, cancelable: true};
  const send = (kind) => list.dispatchEvent(new DragEvent(kind, how));
  send("dragenter");
  const shown = getComputedStyle(document.querySelector(".lp-drop")).display;
  send("drop");
  return shown;
}"""


def test_files_are_dropped_on_the_list_and_what_came_of_it_is_said(
    open_page: Open, fake_server: ServerProcess, faults: list[str]
) -> None:
    page = open_page(fake_server.url)
    assert page.evaluate(DROP, [CHATGPT.read_text(), "conversations.json"]) == "grid"
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("2 conversations came in.")
    expect(dialog.get_by_role("row")).not_to_have_count(0)
    for width in (390, 1024, 1440):
        page.set_viewport_size({"width": width, "height": 800})
        assert dialog.evaluate("(one) => one.scrollWidth <= one.clientWidth"), width
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(page.locator(".lp-drop")).to_be_hidden()
    page.evaluate(DROP, ["no conversations here", "letter.txt"])
    expect(dialog.get_by_role("alert")).to_contain_text("Nothing was imported")
    expect(dialog.get_by_role("alert")).to_contain_text("letter.txt")
    dialog.get_by_role("button", name="Close").click()
    assert len(faults) == 1 and "400" in faults[0]
    faults.clear()  # The browser reports the 400.


def test_the_title_is_edited_on_top_and_an_empty_one_becomes_the_automatic_one(
    open_page: Open, fake_server: ServerProcess
) -> None:
    (conversation,) = bring(fake_server.url, ("Tide tables", ["When is high tide?", "At noon."]))
    page = open_page(f"{fake_server.url}/#/c/{conversation}")
    title = page.get_by_role("heading", level=1)
    title.get_by_role("button", name="Tide tables").click()
    page.keyboard.type("Lost")
    page.keyboard.press("Escape")
    expect(title).to_have_text("Tide tables")
    expect(title.get_by_role("button")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_label("Title").fill("Tides of the north")
    page.keyboard.press("Enter")
    expect(title).to_have_text("Tides of the north")
    expect(page).to_have_title("Tides of the north – localpaged")
    expect(page.locator(".lp-row.on .lp-row-title")).to_have_text("Tides of the north")
    title.get_by_role("button").click()
    page.get_by_label("Title").fill("")
    page.keyboard.press("Enter")
    expect(title).to_have_text("When is high tide?")
    page.get_by_role("button", name="New conversation", exact=True).click()
    expect(title).to_have_text("New conversation")
    expect(title.get_by_role("button")).to_have_count(0)


def test_where_the_kv_is_has_a_dot_and_words(open_page: Open, fake_server: ServerProcess) -> None:
    page = open_page(fake_server.url)
    places = ["gpu", "host", "disk", "none"]
    list_instead(page, [{"title": place, "kv": place} for place in places] + [{"title": "busy", "running": True}])
    expect(page.locator(".lp-row")).to_have_count(5)
    for place, words in zip(places, ["on the GPU", "in memory", "on disk", "not kept"], strict=True):
        dot = page.locator(f".lp-row-open[title={place}] .lp-dot")
        expect(dot).to_have_attribute("title", re.compile(words))
        expect(dot).to_have_attribute("aria-label", re.compile(words))
    expect(page.locator(".lp-row-open[title=busy] .lp-dot.running")).to_have_attribute("title", "Answering")
    pictures = page.locator(".lp-dot").evaluate_all(
        "(dots) => dots.map((dot) => { const s = getComputedStyle(dot); return s.background + s.boxShadow; })"
    )
    assert len(set(pictures)) == 5


def test_the_list_holds_very_many_conversations_and_none(open_page: Open, fake_server: ServerProcess) -> None:
    page = open_page(fake_server.url)
    list_instead(page, [{"title": f"{place} " + "a long title " * 9} for place in range(500)], total=1234)
    expect(page.locator(".lp-row")).to_have_count(500)
    expect(page.get_by_label("Search conversations")).to_have_attribute("placeholder", "Search 1,234 conversations")
    expect(page.locator(".lp-none")).to_have_text("734 more: search for them")
    assert page.locator(".lp-rows [tabindex='0']").count() == 2  # the row that Tab leads to, and its menu
    page.locator(".lp-row-open").first.focus()
    page.keyboard.press("End")
    expect(page.locator(".lp-row-open").last).to_be_focused()
    expect(page.locator(".lp-row-open").last).to_be_in_viewport()
    assert page.locator(".lp-rows").evaluate("(one) => one.scrollWidth <= one.clientWidth")
    page.unroute_all()
    list_instead(page, [])
    expect(page.locator(".lp-none")).to_contain_text("Your conversations will be listed here")


def test_in_a_narrow_window_the_list_is_a_drawer_that_keeps_the_focus(
    open_page: Open, fake_server: ServerProcess
) -> None:
    bring(fake_server.url, ("Narrow", ["Hi", "Hello."]))
    page = open_page(fake_server.url, 390, 844)
    expect(page.locator(".lp-left")).to_be_hidden()
    opener = page.locator(".lp-open-list")
    opener.click()
    expect(page.locator(".lp-left")).to_be_visible()
    assert page.evaluate("document.querySelector('.lp-left').contains(document.activeElement)")
    for _ in range(12):
        page.keyboard.press("Tab")
        outside = "document.activeElement.closest('.lp-main, .lp-head, .lp-composer') !== null"
        assert not page.evaluate(outside)
    page.keyboard.press("Escape")
    expect(page.locator(".lp-left")).to_be_hidden()
    expect(opener).to_be_focused()
    opener.click()
    row = page.locator(".lp-row", has_text="Narrow").first
    row.locator(".lp-row-menu").click()
    box = page.get_by_role("menu").bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
    page.keyboard.press("Escape")
    row.locator(".lp-row-open").click()
    expect(page.locator(".lp-left")).to_be_hidden()
    expect(page.locator("h1")).to_have_text("Narrow")
    assert overflowing(page) == []


def test_an_import_file_of_this_test_is_one_that_the_server_takes() -> None:
    told = json.loads(conversation_file(("One", ["a", "b"])))
    assert [one["parent"] for one in told["conversations"][0]["messages"]] == [None, 1]
