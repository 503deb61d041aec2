"""Take the pictures of docs/screenshots from the real server and the embedded model, as a person sees them.

Usage: python scripts/screenshots.py [FOLDER]
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

from chat_page import ask, wait_for_choice, wait_for_quiet, wait_for_text  # noqa: E402
from server_process import ServerProcess  # noqa: E402

QUESTION = "Give me a name for a small museum in a lighthouse, with a one-line reason."
STORY = "Tell me about the sea at night, seen from a lighthouse, in three paragraphs."
CODE = "Write a Python function that counts the words in a text. Show only the code."


def open_page(browser: Browser, url: str, width: int, height: int, dark: bool = False) -> Page:
    scheme = "dark" if dark else "light"
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(url)
    page.wait_for_selector(".lp-frame")
    page.wait_for_timeout(800)
    return page


def take(page: Page, folder: Path, name: str) -> None:
    page.wait_for_timeout(300)
    page.screenshot(path=folder / f"{name}.png")
    print(name)


def kill_engine(server: ServerProcess) -> None:
    """End the model's process, as running out of memory would."""
    for child in psutil.Process(server.pid).children(recursive=True):
        if "localpaged.engine.process" in " ".join(child.cmdline()):
            child.kill()


def walk(browser: Browser, server: ServerProcess, folder: Path) -> None:
    """The states of a chat, one after the other."""
    page = open_page(browser, server.url, 1440, 900)
    take(page, folder, "empty-light-1440")
    ask(page, STORY, answers=4)
    wait_for_text(page, 4)
    page.wait_for_timeout(2500)
    take(page, folder, "streaming-light-1440")
    kill_engine(server)
    wait_for_choice(page)
    take(page, folder, "error-light-1440")
    page.get_by_role("button", name="New conversation").click()
    ask(page, QUESTION, answers=4)
    wait_for_choice(page)
    take(page, folder, "deck-light-1440")
    address = page.url
    for name, width, height, dark in (
        ("deck-dark-1440", 1440, 900, True),
        ("deck-light-1024", 1024, 768, False),
        ("deck-light-390", 390, 844, False),
    ):
        other = open_page(browser, address, width, height, dark)
        take(other, folder, name)
        other.close()
    page.keyboard.press("2")
    page.wait_for_selector(".lp-switch")
    ask(page, CODE, answers=2)
    wait_for_choice(page)
    take(page, folder, "second-turn-light-1440")
    page.keyboard.press("1")
    wait_for_quiet(page)
    take(page, folder, "chosen-light-1440")
    page.get_by_role("tab", name="KV memory").click()
    take(page, folder, "kv-light-1440")
    take_list(browser, page.url, folder)
    address = page.url
    page.close()
    for name, width, height, dark in (
        ("chosen-dark-1440", 1440, 900, True),
        ("chosen-dark-390", 390, 844, True),
        ("chosen-light-1024", 1024, 768, False),
    ):
        other = open_page(browser, address, width, height, dark)
        take(other, folder, name)
        other.close()


def take_list(browser: Browser, address: str, folder: Path) -> None:
    """A search with its hits, the menu of a row, and the settings."""
    page = open_page(browser, address, 1440, 900)
    page.keyboard.press("Control+k")
    page.keyboard.type("lighthouse")
    page.wait_for_selector(".lp-hit mark")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+F10")
    page.wait_for_selector(".lp-menu")
    take(page, folder, "search-light-1440")
    page.close()
    page = open_page(browser, address, 1024, 768, dark=True)
    page.get_by_role("button", name="Settings").click()
    page.locator(".lp-folder code").evaluate("(one) => (one.textContent = '~/.local/share/localpaged')")
    take(page, folder, "settings-dark-1024")
    page.close()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "scripts" / "find_program.py"), "chromium"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found.stdout.strip(), args=["--no-sandbox"])
        command = [sys.executable, "-m", "localpaged", "serve", "--port", "PORT", "--kv-cache-memory", "1G"]
        server = ServerProcess(command, Path(home), LOCALPAGED_HOME=os.environ.get("LOCALPAGED_HOME", home))
        server.start()
        try:
            walk(browser, server, folder)
        finally:
            server.stop()
            browser.close()


if __name__ == "__main__":
    main()
