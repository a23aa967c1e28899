"""The page in a browser, before a gateway whose nodes do as a test says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from tokenizers import Tokenizer

from common.config import GatewayConfig
from gateway.fake import Script
from gateway.text import TextPipeline
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.gateway.live import live_gateway
from tests.web.browser import Watched, opened
from tests.web.steps import chat, says, with_answers

MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"
KEY = "sk-the-quick-brown-fox"


def test_an_answer_comes_in_and_shows_where_its_time_went(
    watched: Watched, server: LiveServer, byte_level: Tokenizer
) -> None:
    server.nodes.script = says(byte_level, "seven sailors")
    page = watched.page
    page.goto("/")
    expect(page.locator("#model")).to_have_text(MODEL)
    with page.expect_response("**/v1/chat/completions") as answered:
        chat(page, "who?")
    expect(page.locator("#log .answer .text")).to_have_text("seven sailors")
    expect(page.locator("#log .user .text")).to_have_text("who?")
    sent = answered.value.request.post_data_json
    assert sent["messages"] == [{"role": "user", "content": "who?"}]
    timeline = page.locator("#log .answer .timeline")
    expect(timeline.locator("dt")).to_have_text(
        ["tokenize", "submit", "queue", "prefill", "transfer", "send", "decode"]
    )
    expect(timeline).to_contain_text("decode-1")
    chat(page, "and?")
    expect(page.locator("#log .answer .timeline dl")).to_have_count(2)
    first, second = (len(stream.prompt_ids) for stream in server.nodes.streams)
    assert second > 2 * first  # the conversation went with it
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#log article")).to_have_count(0)
    expect(page.get_by_label("Message")).to_be_focused()


def test_the_keyboard_alone_will_do(watched: Watched, server: LiveServer, byte_level: Tokenizer) -> None:
    server.nodes.script = says(byte_level, "she sells sea shells")
    page = watched.page
    page.goto("/")
    expect(page.locator("#rows")).to_be_attached()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the chat")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message")).to_be_focused()
    for word in ("one", "two"):
        page.keyboard.type(word)
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("more")
        page.keyboard.press("Enter")
        expect(page.locator("#log .user .text").last).to_have_text(f"{word}\nmore")
        expect(page.get_by_role("button", name="Stop", exact=True)).to_be_disabled()
    server.nodes.script = says(byte_level, "she sells sea shells", hold_after=3)
    page.keyboard.type("three")
    page.keyboard.press("Enter")
    expect(page.locator("#log .answer .text").last).not_to_be_empty()
    assert server.nodes.streams[-1].aborted is False
    page.keyboard.press("Escape")
    expect(page.locator("#log .answer .timeline").last).to_contain_text("Stopped.")
    assert server.nodes.wait_idle(WAIT_S)
    assert server.nodes.streams[-1].aborted
    # Its timeline is the server's, which saw its client leave.
    expect(page.locator("#log .answer .timeline dl")).to_have_count(3)
    # With the button of its own: the keys go on in the message.
    page.keyboard.type("four")
    page.keyboard.press("Tab")  # Stop is disabled
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_focused()
    page.keyboard.press("Space")
    expect(page.locator("#log .answer .text").last).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator("#log .answer .timeline").last).to_contain_text("Stopped.")
    # From the message back to the requests: Tab goes to one row, arrows to the others.
    rows = page.locator("#rows .row")
    expect(rows).to_have_count(4)
    expect(rows.first).to_contain_text("client gone")
    page.get_by_label("all").focus()
    seen = []
    for key in ("Tab", "Tab", "ArrowDown", "ArrowDown", "ArrowUp", "End", "Home"):
        page.keyboard.press(key)
        seen.append(page.evaluate("[...document.querySelectorAll('.row')].indexOf(document.activeElement)"))
    assert seen == [-1, 0, 1, 2, 1, 3, 0]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    expect(page.locator("#detail")).to_contain_text("client gone")
    page.keyboard.press("Tab")  # out of the list again
    expect(page.locator("#rows .row:focus")).to_have_count(0)


def test_what_servers_say_is_text(watched: Watched, server: LiveServer, byte_level: Tokenizer) -> None:
    server.nodes.script = says(byte_level, MARKUP)
    server.nodes.missing = (MARKUP,)
    page = watched.page

    def change(answer: dict[str, Any]) -> dict[str, Any]:
        for request in answer["requests"]:
            request |= {"id": MARKUP, "outcome": "failed", "error": MARKUP, "endpoint": MARKUP}
        return answer | {"gateway": MARKUP}

    with_answers(page, change)
    page.goto("/")
    chat(page, MARKUP)
    expect(page.locator("#log .text")).to_have_text([MARKUP, MARKUP])
    expect(page.locator("#nodes [data-state=missing] b")).to_have_text(MARKUP)
    page.locator("#rows .row").hover()
    expect(page.locator("#detail b")).to_have_text(MARKUP)
    expect(page.locator("#detail .error")).to_contain_text(MARKUP)
    expect(page.locator("#status")).to_contain_text(MARKUP)
    assert page.locator("img").count() == 1  # the page's own
    assert page.locator("#log b, #detail b b, #status b").count() == 0


def test_errors_are_said_in_words(watched: Watched, server: LiveServer) -> None:
    server.nodes.is_usable = False
    server.nodes.script = Script(fail_after=2)
    page = watched.page
    page.goto("/")
    chat(page, "anyone?")
    expect(page.locator("#log [role=alert]")).to_have_text("the decode node died")
    expect(page.get_by_label("Message")).to_have_value("anyone?")  # to be sent again
    chat(page, "x " * 2000)
    expect(page.locator("#log [role=alert]").last).to_contain_text("512")
    watched.errors.clear()  # the browser's own line about a status of 400


def test_a_key_is_asked_for_and_kept_for_the_tab(chromium: Browser, text: TextPipeline) -> None:
    with live_gateway(text, GatewayConfig(api_key=KEY)) as guarded, opened(chromium, guarded.url) as watched:
        page = watched.page
        page.goto("/")
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        expect(page.locator("#key-message")).to_contain_text("no API key")
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-message")).to_contain_text("is not the server's")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        field.fill("schlüssel \u6f22")
        page.keyboard.press("Enter")
        expect(page.locator("#key-message")).to_contain_text("cannot be sent")
        assert asked == []
        assert all("401" in error for error in watched.errors)  # the browser's own lines
        watched.errors.clear()
        field.fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#nodes .card")).to_have_count(2)
        expect(field).to_be_hidden()
        chat(page, "the quick")
        expect(page.locator("#log .timeline dl")).to_be_visible()
        page.reload()
        expect(page.locator("#nodes .card")).to_have_count(2)
        watched.assert_behaved()


def test_requests_of_several_gateways_are_one_list(
    watched: Watched, server: LiveServer, byte_level: Tokenizer
) -> None:
    server.nodes.script = says(byte_level, "one")
    page = watched.page
    turns = itertools.cycle(("gateway-1", "gateway-2"))
    with_answers(page, lambda answer: answer | {"gateway": next(turns)})
    page.goto("/")
    chat(page, "hello")
    expect(page.locator("#status")).to_have_text("live from gateway-1, gateway-2")
    expect(page.locator("#rows .row")).to_have_count(2)  # the same id, at each of them
    expect(page.locator("#num-ended")).to_have_text("2")


def test_a_filter_shows_those_that_live_or_ended(
    watched: Watched, server: LiveServer, byte_level: Tokenizer
) -> None:
    server.nodes.script = says(byte_level, "one")
    page = watched.page
    page.goto("/")
    chat(page, "hello")
    expect(page.locator("#log .timeline dl")).to_be_visible()
    server.nodes.script = says(byte_level, "one two three four", hold_after=2)
    chat(page, "hello")
    rows = page.locator("#rows .row")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("decoding")
    page.locator("#requests").get_by_label("live").check()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("decoding")
    page.locator("#requests").get_by_label("ended").check()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("stop")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(rows).to_have_count(2)


def test_bars_of_long_requests_are_whole(watched: Watched, server: LiveServer, byte_level: Tokenizer) -> None:
    server.nodes.script = says(byte_level, "one")
    page = watched.page

    def change(answer: dict[str, Any]) -> dict[str, Any]:
        for request in answer["requests"]:
            request["timings"] |= {"decode_ms": 1e6, "total_ms": 1e6}
        return answer

    with_answers(page, change)
    page.goto("/")
    chat(page, "hello")
    expect(page.locator("#rows .row")).to_have_count(1)
    page.get_by_label("at their start").check()
    expect(page.locator("#requests .axis span").last).to_have_text("20 min")
    bar = page.locator("#rows svg").bounding_box()
    decode = page.locator("#rows rect[data-stage=decode]").bounding_box()
    assert bar is not None
    assert decode is not None
    assert decode["width"] == pytest.approx(bar["width"] * 1000 / 1200, abs=1)
