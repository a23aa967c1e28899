"""What tests of the page do again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, Route
from tokenizers import Tokenizer

from gateway.fake import Script
from tests.tiny import IM_END


def says(byte_level: Tokenizer, text: str, **script: Any) -> Script:
    """Have the nodes answer with a text."""
    ids = [*byte_level.encode(text, add_special_tokens=False).ids, IM_END]
    return Script(lambda _: ids, eos_token_ids=(IM_END,), **script)


def with_answers(page: Page, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change what /debug/requests answers."""

    def answer(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, json=change(response.json()))

    page.route("**/debug/requests", answer)


def chat(page: Page, question: str) -> None:
    """Ask something."""
    page.get_by_label("Message").fill(question)
    page.get_by_role("button", name="Send", exact=True).click()
