"""The settings of the page: language, text size, theme, defaults, data, who is logged in, keys."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_page import ask, command, overflowing, wait_for_choice
from playwright.sync_api import Page, Route, expect
from server_process import ServerProcess

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Open = Callable[..., Page]
SCRIPTS = Path(__file__).parent.parent.parent / "localpaged" / "ui" / "static" / "js"

# Words in Latin letters that stand in the Japanese page: names, file formats, keys, units.
NAMES = re.compile(
    r"localpaged|fake-135M|LlamaForCausalLM|float32|cpu|CPU|GPU|KV|Top [pk]|Min p|JSON|Markdown|English|Python|MB"
    r"|Ctrl|Shift|Alt|Enter|Esc|Del|kB|GB|Qwen/Qwen3-0\.6B|pull|serve|--model"
)

VISIBLE_TEXTS = """() => {
  const shown = (element) => element.checkVisibility({visibilityProperty: true}) && element.getClientRects().length;
  const skip = ".lp-md, .lp-user, .lp-folder, .lp-row-title, h1, script, style, .lp-boot";
  const texts = [];
  for (const element of document.body.querySelectorAll("*")) {
    if (!shown(element) || element.closest(skip)) continue;
    for (const name of ["aria-label", "title", "placeholder"]) {
      const text = element.getAttribute(name);
      if (text && !element.closest(".lp-row, .lp-card-sub")) texts.push(text);
    }
    for (const node of element.childNodes) if (node.nodeType === 3 && node.data.trim()) texts.push(node.data.trim());
  }
  return texts;
}"""


def english(page: Page) -> list[str]:
    """What still has an English word in it."""
    return [text for text in page.evaluate(VISIBLE_TEXTS) if re.search(r"[A-Za-z]{2,}", NAMES.sub("", text))]


def with_state(page: Page, **fields: Any) -> None:
    """Let the server tell something else of itself."""

    def answer(route: Route) -> None:
        route.fulfill(json=route.fetch().json() | fields)

    page.route("**/api/state", answer)


def keys_of(language: str) -> set[str]:
    text = (SCRIPTS / f"words_{language}.js").read_text()
    return set(re.findall(r'^  "?([\w.]+)"?:', text, re.MULTILINE))


def test_every_key_has_words_in_both_languages_and_every_key_in_use_is_there() -> None:
    known = keys_of("en")
    assert known == keys_of("ja") and len(known) > 200
    values = {
        language: {
            key: set(re.findall(r"\{(\w+)\}", entry)) - {"n"}
            for key, entry in re.findall(
                r'^  "?([\w.]+)"?:((?:.(?!^  "?[\w.]+"?:))*)',
                (SCRIPTS / f"words_{language}.js").read_text(),
                re.MULTILINE | re.DOTALL,
            )
        }
        for language in ("en", "ja")
    }
    assert values["en"] == values["ja"]
    used, patterns = set(), set()
    for path in SCRIPTS.glob("*.js"):
        text = path.read_text()
        for call in re.findall(r"\bt\(([^;]*?)\)", text):
            used |= set(re.findall(r'"([a-z]+(?:\.[\w.]+)?)"', call.split(", {")[0]))
            patterns |= set(re.findall(r"`([^`]*)`", call))
    named = {key for key in used if "." in key}
    assert named <= known and len(named) > 150
    for pattern in patterns:
        form = re.compile(re.sub(r"\\\$\\\{.*?\\\}", r"[\\w.]+", re.escape(pattern)))
        assert any(form.fullmatch(key) for key in known), pattern


def test_in_japanese_no_english_is_left_on_the_main_screens(open_page: Open, fake_server: ServerProcess) -> None:
    page = open_page(fake_server.url, locale="ja-JP")
    assert page.evaluate("document.documentElement.lang") == "ja"
    expect(page.locator(".lp-chip")).to_contain_text("fake-135M")
    expect(page.locator("#lp-seed input")).to_have_attribute("placeholder", "毎回新しい値")
    assert english(page) == []
    page.get_by_label("回答の数").select_option("2")
    page.get_by_label("メッセージ", exact=True).fill("灯台")
    page.keyboard.press("Enter")
    expect(page.locator(".lp-deck.open")).to_be_visible()
    for width in (1440, 1024, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert english(page) == []
        assert overflowing(page) == [], width
    page.get_by_role("button", name="パラメーターと KV").click()
    page.get_by_role("tab", name="KV メモリ").click()
    expect(page.locator(".lp-big")).to_contain_text("使用中")
    assert english(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="会話の一覧").click()
    row = page.locator(".lp-row.on")
    row.locator(".lp-row-menu").click()
    expect(page.get_by_role("menu")).to_be_visible()
    assert english(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="設定").click()
    expect(page.get_by_role("dialog")).to_contain_text("キーボードショートカット")
    assert english(page) == []
    page.keyboard.press("Escape")
    page.get_by_label("会話を検索").fill("見つからない言葉")
    expect(page.locator(".lp-none")).to_contain_text("一致する会話はありません")
    assert english(page) == []


def test_the_language_is_chosen_in_the_settings_which_stay_open(open_page: Open, fake_server: ServerProcess) -> None:
    page = open_page(fake_server.url)
    page.get_by_label("Message", exact=True).fill("A draft")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Language").select_option("ja")
    expect(page.get_by_role("dialog")).to_contain_text("言語")
    expect(page.locator("html")).to_have_attribute("lang", "ja")
    page.get_by_label("言語").select_option("en")
    expect(page.get_by_role("dialog")).to_contain_text("Language")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Message", exact=True)).to_have_value("A draft")


def test_text_size_and_theme_are_kept(open_page: Open, fake_server: ServerProcess) -> None:
    page = open_page(fake_server.url)
    height = "parseFloat(getComputedStyle(document.querySelector('.lp-write')).fontSize)"
    before = page.evaluate(height)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Text size").select_option("largest")
    assert page.evaluate(height) == pytest.approx(1.3 * before, rel=1e-3)
    page.get_by_label("Theme").select_option("dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    for width in (390, 1024, 1440):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.get_by_role("dialog").evaluate("(one) => one.scrollWidth <= one.clientWidth"), width
        assert overflowing(page) == [], width
    page.reload()
    page.wait_for_selector(".lp-frame")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.evaluate(height) == pytest.approx(1.3 * before, rel=1e-3)
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Theme")).to_have_value("dark")
    page.get_by_label("Theme").select_option("system")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_new_conversations_begin_with_the_defaults(open_page: Open, fake_server: ServerProcess) -> None:
    page = open_page(fake_server.url)
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Answers").select_option("2")
    dialog.get_by_label("Temperature").fill("0.25")
    dialog.get_by_label("Longest answer (tokens)").fill("77")
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    expect(page.get_by_label("How many answers")).to_have_value("2")
    expect(page.locator(".lp-tools")).to_contain_text("T 0.25")
    expect(page.locator("#lp-longest input")).to_have_value("77")
    ask(page, "With defaults")
    wait_for_choice(page)
    page.get_by_label("How many answers").select_option("4")
    page.get_by_role("button", name="New conversation", exact=True).click()
    expect(page.get_by_label("How many answers")).to_have_value("2")
    page.get_by_role("button", name="Settings").click()
    dialog.get_by_label("Answers").select_option("As used last")
    page.keyboard.press("Escape")
    expect(page.get_by_label("How many answers")).to_have_value("4")


def test_the_dialog_keeps_the_focus_and_gives_it_back(open_page: Open, fake_server: ServerProcess) -> None:
    page = open_page(fake_server.url)
    opener = page.get_by_role("button", name="Settings")
    opener.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Settings")
    expect(dialog).to_be_visible()
    for _ in range(14):
        page.keyboard.press("Tab")
        inside = "document.activeElement === document.body || document.activeElement.closest('dialog') !== null"
        assert page.evaluate(inside)
    # The keys of the page below do nothing.
    page.keyboard.press("Control+k")
    expect(page.get_by_label("Search conversations")).not_to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(opener).to_be_focused()
    page.keyboard.press("Enter")
    page.mouse.click(5, 5)
    expect(dialog).to_have_count(0)


def test_the_data_folder_and_who_is_logged_in_are_told(open_page: Open, fake_server: ServerProcess) -> None:
    page = open_page(fake_server.url, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(str(fake_server.folder))
    expect(dialog).to_contain_text("No login is needed here.")
    expect(dialog.get_by_role("button", name="Log out")).to_have_count(0)
    dialog.get_by_role("button", name="Copy: Data folder").click()
    expect(dialog.get_by_role("button", name="Copy: Data folder")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == str(fake_server.folder)
    with_state(page, user="anna", needs_login=True, data_folder=None)
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(dialog).to_contain_text("You are logged in as anna.")
    expect(dialog).not_to_contain_text("Data folder")
    expect(dialog.get_by_role("button", name="Log out")).to_be_visible()


AXE = Path(__file__).parent.parent / "data" / "axe" / "axe.min.js"


def findings(page: Page) -> list[str]:
    """What keeps people from using the page, as axe-core sees it: the serious and the critical."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for one in result["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_page: Open, fake_server: ServerProcess, theme: str) -> None:
    page = open_page(fake_server.url, color_scheme=theme, reduced_motion="reduce")
    expect(page.locator(".lp-chip")).to_contain_text("fake-135M")
    assert findings(page) == []
    ask(page, "Names, please", answers=4)
    wait_for_choice(page)
    assert findings(page) == []
    page.keyboard.press("1")
    expect(page.locator(".lp-turn.assistant")).to_be_visible()
    row = page.locator(".lp-row.on")
    row.hover()
    row.locator(".lp-row-menu").click()
    expect(page.get_by_role("menu")).to_be_visible()
    assert findings(page) == []
    page.keyboard.press("Escape")
    page.get_by_label("Search conversations").fill("names")
    expect(page.locator(".lp-hit mark").first).to_be_visible()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert findings(page) == []
    page.keyboard.press("Escape")
    assert findings(page) == []
    command(page, row, "Delete")
    expect(page.locator(".lp-toast")).to_be_visible()
    assert findings(page) == []
