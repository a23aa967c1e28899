"""Pictures of the page under load, for the docs: `python -m tests.web.screenshots` (or `make pictures`).

Serves the default model, keeps 32 streams with prompts of many lengths open, asks something in the chat, and
takes the page light, dark and at phone width once it has watched for a minute.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import httpx
from playwright.sync_api import Page, expect

from benchmarks.server import running
from model_store.store import resolve_model
from tests.web.browser import browser, opened

FOLDER = Path(__file__).parents[2] / "docs" / "page"
MODEL = "smollm2-135m"
NUM_STREAMS = 32
WORDS = ("baton", "runner", "track", "hand", "over", "once", "in", "order", "to", "the", "next", "along")
PICTURES = {"light": ((1280, 900), "light"), "dark": ((1280, 900), "dark"), "narrow": ((360, 740), "light")}
QUESTION = "What is a relay race? Answer in two sentences."
MOST_BYTES = 300_000


@contextmanager
def load(url: str) -> Iterator[None]:
    """Keep streams open in another thread."""
    loop = asyncio.new_event_loop()

    async def stream(http: httpx.AsyncClient, number: int) -> None:
        draw = random.Random(number)
        while True:
            num_words = draw.choice((20, 50, 100, 300, 900))
            prompt = " ".join(draw.choice(WORDS) for _ in range(num_words))
            body = {"model": MODEL, "prompt": prompt, "max_tokens": draw.randrange(40, 240), "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    if draw.random() < 0.0005:
                        break  # a client that had enough

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            await asyncio.gather(*(stream(http, number) for number in range(NUM_STREAMS)))

    task = loop.create_task(run())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def take(page: Page, name: str) -> None:
    """Write one picture."""
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path, full_page=True, animations="disabled")
    click.echo(f"{path}: {path.stat().st_size:,} bytes")
    assert path.stat().st_size < MOST_BYTES


def main() -> None:
    """Take them all."""
    FOLDER.mkdir(exist_ok=True)
    with ExitStack() as stack:
        url = stack.enter_context(running(resolve_model(MODEL, click.echo), "--served-model-name", MODEL))
        stack.enter_context(load(url))
        chromium = stack.enter_context(browser())
        pages = {
            name: stack.enter_context(opened(chromium, url, size, scheme)).page
            for name, (size, scheme) in PICTURES.items()
        }
        for page in pages.values():
            page.goto("/")
        for page in pages.values():
            expect(page.locator("#plots .foot span").first).to_have_text("2 min ago", timeout=180_000)
        for name, page in pages.items():
            page.get_by_label("Message").fill(QUESTION)
            page.keyboard.press("Enter")
            expect(page.locator("#log .timeline dl")).to_be_visible(timeout=180_000)
            page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
            if name != "narrow":
                page.locator("#rows .row").nth(12).dispatch_event("pointerover")
            take(page, name)


if __name__ == "__main__":
    main()
