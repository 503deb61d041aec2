"""What a person does on the chat page, in words."""

import re

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
