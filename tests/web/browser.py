"""Chromium without a window, and pages in it that are watched: for errors, and for requests elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "there is no Chromium here for the tests of the page (Debian: apt-get install chromium)"
DESKTOP, PHONE = (1280, 900), (360, 740)


def chromium_path() -> str | None:
    """Return the path of an installed Chromium."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """Run Chromium. Its own sandbox does not work as root, and it is only shown what we serve."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        yield running
        running.close()


@dataclass
class Watched:
    """A page, and what it did that a page should not do."""

    page: Page
    host: str
    errors: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)  # addresses elsewhere that it asked

    def __post_init__(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._on_request)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} ({message.location.get('url')})")

    def _on_request(self, request: Any) -> None:
        if urlsplit(request.url).netloc != self.host:
            self.strangers.append(request.url)

    def assert_behaved(self) -> None:
        """Check that nothing went wrong."""
        assert self.errors == []
        assert self.strangers == []


@contextmanager
def opened(
    browser: Browser, url: str, size: tuple[int, int] = DESKTOP, scheme: Any = "light", **options: Any
) -> Iterator[Watched]:
    """A page of its own, not yet at the address, in a profile of its own."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, base_url=url, **options
    )
    context.set_default_timeout(20_000)
    watched = Watched(context.new_page(), urlsplit(url).netloc)
    try:
        yield watched
    finally:
        context.close()
