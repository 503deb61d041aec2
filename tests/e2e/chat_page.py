"""What a person does on the chat page, in words."""

import json
import re
from typing import Any

import httpx
from playwright.sync_api import Locator, Page, expect

ANSWER_TIMEOUT_MS = 120_000


def ask(page: Page, text: str, answers: int | None = None) -> None:
    """Write a message and press Enter."""
    if answers is not None:
        page.get_by_label("How many answers").select_option(str(answers))
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".lp-user").last).to_have_text(text)


def cards(page: Page) -> Locator:
    return page.locator(".lp-card")


def wait_for_text(page: Page, count: int) -> None:
    """Wait until every one of the answers has begun."""
    expect(cards(page)).to_have_count(count, timeout=ANSWER_TIMEOUT_MS)
    for place in range(count):
        expect(cards(page).nth(place).locator(".lp-card-body")).to_have_text(
            re.compile(r"\S"), timeout=ANSWER_TIMEOUT_MS
        )


def wait_for_choice(page: Page) -> None:
    """Wait until all answers are there and one may be chosen."""
    expect(page.locator(".lp-deck.open")).to_be_visible(timeout=ANSWER_TIMEOUT_MS)
    expect(page.locator(".lp-write")).to_have_attribute("placeholder", re.compile("Choose an answer first"))


def wait_for_quiet(page: Page) -> None:
    """Wait until nothing is being written."""
    expect(page.locator(".lp-box").get_by_role("button", name="Send")).to_be_visible(timeout=ANSWER_TIMEOUT_MS)
    expect(page.locator(".lp-card[data-state=decoding]")).to_have_count(0)


def overflowing(page: Page) -> list[str]:
    """Elements that stick out of the window to the side, other than what scrolls by itself."""
    return page.evaluate(
        """() => {
          const wide = [document.documentElement, ...document.querySelectorAll(".lp-main, .lp-card-body, #lp-side")]
            .filter((element) => element.scrollWidth > element.clientWidth)
            .map((element) => `${element.tagName}.${element.className} ${element.scrollWidth}`);
          const out = [...document.querySelectorAll(".lp-frame *")]
            .filter((element) => !element.closest(".lp-deck, .lp-table, pre, .lp-left, .lp-hidden"))
            .filter((element) => element.getBoundingClientRect().right > innerWidth + 1)
            .map((element) => `${element.tagName}.${element.className}`);
          return [...wide, ...out];
        }"""
    )


def command(page: Page, row: Locator, name: str) -> None:
    """Choose a command from the menu of a row of the list."""
    row.hover()
    row.get_by_role("button", name="More").click()
    page.get_by_role("menuitem", name=name, exact=True).click()


def conversation_file(*conversations: tuple[str, list[str]], **fields: Any) -> bytes:
    """An export of conversations: titles, and texts under each other, by the user and the model in turn."""
    stamp = 1_700_000_000
    told = [
        {
            **{"title": title, "created": stamp, "updated": stamp + place, **fields},
            "messages": [
                {
                    **{"id": number, "parent": number - 1 or None, "text": text, "state": "complete", "created": stamp},
                    "role": "user" if number % 2 else "assistant",
                }
                for number, text in enumerate(texts, 1)
            ],
        }
        for place, (title, texts) in enumerate(conversations)
    ]
    return json.dumps({"format": "localpaged-conversations", "version": 1, "conversations": told}).encode()


def bring(url: str, *conversations: tuple[str, list[str]], **fields: Any) -> list[int]:
    """Put conversations into a server; their ids."""
    answer = httpx.post(f"{url}/api/import", content=conversation_file(*conversations, **fields))
    ids: list[int] = answer.json()["imported"]
    return ids


def list_instead(page: Page, conversations: list[dict[str, Any]], total: int | None = None) -> None:
    """Let the page list these conversations, of which only what matters is given."""
    known = {
        **{"system_prompt": "", "settings": {}, "pinned": False, "kv_pinned": False, "archived": False, "created": 1.0},
        **{"updated": 1.0, "snippet": None, "marked_title": None, "hits": [], "num_hits": 0, "running": False},
        "kv": "none",
    }
    body = {
        "conversations": [{**known, "id": place, **one} for place, one in enumerate(conversations, 1)],
        "total": len(conversations) if total is None else total,
    }
    page.route("**/api/conversations?*", lambda route: route.fulfill(json=body))
    page.evaluate("dispatchEvent(new Event('focus'))")
