"""Drive the chat page of a running server in a headless Chromium: a message, tokens as they come, stop, a long answer.

    pip install playwright
    python tests/serving/drive_page.py http://127.0.0.1:8000 --chromium /usr/bin/chromium

It ends with 0 where the page does all of it, with a model whose answers are long and of whole characters, such as one
of bytes that was trained on text. Playwright is no dependency of meshwright's.
"""

import argparse
import time
from collections.abc import Callable

from playwright.sync_api import Page, sync_playwright

LONGEST = 60.0
"""Seconds that a server may take for an answer."""


def send(page: Page, text: str) -> None:
    """Type a message, and send it by Enter."""
    page.fill("#message", text)
    page.press("#message", "Enter")


def answer_length(page: Page) -> int:
    """Characters of the last answer so far."""
    return page.evaluate("[...document.querySelectorAll('.assistant')].at(-1)?.textContent.length ?? 0")


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; the page's policy lets playwright's own wait run no script."""
    end = time.monotonic() + LONGEST
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_until_idle(page: Page) -> None:
    """Wait until no answer is being made."""
    wait_until(lambda: page.is_disabled("#stop"))


def check_page(page: Page, *, most_tokens: int) -> None:
    """A chat of a few messages, each with what it shows."""
    page.click("summary:text('Settings')")
    page.fill("#limit", str(most_tokens))
    page.fill("#temperature", "0")
    page.click("summary:text('Settings')")

    page.evaluate("new MutationObserver(seen => pieces += seen.length).observe(log, {childList: true, subtree: true})")
    page.evaluate("pieces = 0")
    send(page, "Hello, <b>world</b>! Grüße 東京")
    assert page.inner_text(".user") == "Hello, <b>world</b>! Grüße 東京", "a message is shown as text, not as HTML"
    wait_until_idle(page)
    pieces = page.evaluate("pieces")
    assert pieces > 3, f"the answer came in {pieces} pieces"
    assert "tokens/s" in page.inner_text(".note:last-child")
    shown = page.inner_text(".assistant")
    assert shown
    assert "\N{REPLACEMENT CHARACTER}" not in shown[:-1], "a character was cut between two pieces"

    # Stop, in the middle of an answer.
    send(page, "Go on.")
    wait_until(lambda: page.locator(".assistant").count() == 2 and answer_length(page) > 3)
    page.click("#stop")
    wait_until_idle(page)
    assert page.inner_text(".note:last-child") == "stopped"
    length = answer_length(page)
    time.sleep(0.3)
    assert answer_length(page) == length, "text came after the stop"

    # A third message has what was said before, and a long answer is scrolled to its end.
    send(page, "And a long answer.")
    wait_until_idle(page)
    log = page.evaluate("(({scrollHeight, scrollTop, clientHeight}) => scrollHeight - scrollTop - clientHeight)(log)")
    assert log < 60, f"the log ends {log} pixels below what is shown"
    assert page.locator(".turn").count() == 6

    page.click("#new")
    assert page.locator(".turn").count() == 0


def take_picture(page: Page, path: str, messages: list[str]) -> None:
    """A picture of a chat of some messages."""
    for text in messages:
        send(page, text)
        wait_until_idle(page)
    page.screenshot(path=path)


def main() -> None:
    """Open the page, light and dark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--chromium", help="the browser; playwright's own where none is given")
    parser.add_argument("--most-tokens", type=int, default=400)
    parser.add_argument("--screenshot", help="a .png file to take a picture to, instead, of a chat of --messages")
    parser.add_argument("--messages", nargs="+", default=["What is a mesh?"])
    args = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium)
        for scheme in ("light", "dark"):
            context = browser.new_context(color_scheme=scheme, viewport={"width": 900, "height": 640})
            page = context.new_page()
            wrong, asked = [], []
            page.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
            page.on("console", lambda said, wrong=wrong: wrong.append(said.text) if said.type == "error" else None)
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.goto(args.url)
            if args.screenshot:
                take_picture(page, args.screenshot, args.messages)
                break
            check_page(page, most_tokens=args.most_tokens)
            assert not wrong, wrong
            assert all(url.startswith((args.url, "data:")) for url in asked), asked
            context.close()
        browser.close()
    if not args.screenshot:
        print("the page does what it should")


if __name__ == "__main__":
    main()
