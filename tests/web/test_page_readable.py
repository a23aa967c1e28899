"""The page as it is read: colours, sizes, light and dark, and by a screen reader."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, expect
from tokenizers import Tokenizer

from gateway.fake import Script
from tests.gateway.conftest import LiveServer
from tests.web.browser import DESKTOP, PHONE, Watched, opened
from tests.web.steps import chat, says

# Every text against the ground that it stands on, and the edge of all that is drawn, by WCAG 2.1's formula.
CONTRASTS = """() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => parse(color).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return Math.round(100 * (a + 0.05) / (b + 0.05)) / 100;
  };
  const ground = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return (parse(color)[3] ?? 1) === 0 && node.parentElement ? ground(node.parentElement) : color;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (node.closest(":disabled, noscript")) continue;
    found.push([ratio(getComputedStyle(node).color, ground(node)), walker.currentNode.data]);
  }
  const drawn = [];
  const DRAWN = 'rect.stage, path.line, .swatch, .node .bars, textarea, #status';
  for (const node of document.querySelectorAll(DRAWN)) {
    const style = getComputedStyle(node, node.id === 'status' ? '::before' : null);
    const inside = node instanceof SVGElement ? style.fill : style.backgroundColor;
    const paint = node.matches('.node .bars, textarea') ? style.borderTopColor
      : style.stroke !== 'none' ? style.stroke : inside;
    const name = String(node.classList) || node.tagName;
    if (style.opacity !== '1') drawn.push([0, `${name} is seen through`]);
    if (!node.matches('.free')) drawn.push([ratio(paint, ground(node.parentElement)), name]);
  }
  // A node's pages stand on those that are free.
  const free = getComputedStyle(document.querySelector('.swatch.free')).backgroundColor;
  for (const node of document.querySelectorAll('.swatch.page:not(.free)')) {
    drawn.push([ratio(getComputedStyle(node).backgroundColor, free), `${node.classList} on free`]);
  }
  return {text: found, drawn};
}"""
# What one would have to scroll sideways for.
SIDEWAYS = """() => [...document.querySelectorAll('html, section, #log, #rows, #detail')]
  .filter((node) => node.scrollWidth > node.clientWidth).map((node) => node.id || node.tagName)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_can_be_read(
    chromium: Browser, server: LiveServer, byte_level: Tokenizer, size: tuple[int, int], scheme: str
) -> None:
    server.nodes.script = says(byte_level, "wordwithoutend" * 20)
    server.nodes.missing = ("prefill-1",)
    with opened(chromium, server.url, size, scheme, reduced_motion="reduce") as watched:
        page = watched.page
        page.goto("/")
        chat(page, "x" * 100)
        expect(page.locator("#log .timeline dl")).to_be_visible()
        server.nodes.script = Script(fail_after=0)
        chat(page, "again")
        expect(page.locator("#log [role=alert]")).to_be_visible()
        page.locator("#rows .row[data-state=failed]").focus()
        expect(page.locator("#detail .error")).to_be_visible()
        assert page.evaluate(SIDEWAYS) == []
        server.nodes.script = says(byte_level, "one two three four", hold_after=2)
        chat(page, "and again")
        expect(page.locator("#rows rect[data-open]")).to_have_count(1)
        contrasts = page.evaluate(CONTRASTS)
        assert [text for text in contrasts["text"] if text[0] < 4.5] == []
        assert [part for part in contrasts["drawn"] if part[0] < 3] == []
        assert {"stage queue", "stage decode", "line line0", "TEXTAREA"} <= {
            name for _, name in contrasts["drawn"]
        }
        page.get_by_role("button", name="Stop", exact=True).click()
        assert page.evaluate("document.getAnimations().length") == 0
        watched.errors.clear()  # the browser's own line about a status of 503
        watched.assert_behaved()


def test_a_screen_reader_finds_its_way(watched: Watched, server: LiveServer, byte_level: Tokenizer) -> None:
    server.nodes.script = says(byte_level, "one")
    page = watched.page
    page.goto("/")
    chat(page, "hello")
    expect(page.locator("#rows .row")).to_have_count(1)
    for landmark in ("banner", "main", "navigation"):
        expect(page.get_by_role(landmark)).to_have_count(1)
    titles = ["Nodes and their KV pages", "Throughput and latency", "Requests", "Chat", "Failures"]
    for title in titles:
        expect(page.get_by_role("region", name=title, exact=True)).to_have_count(1)
    expect(page.get_by_role("log", name="Conversation")).to_have_attribute("aria-live", "polite")
    expect(page.get_by_role("img", name="free")).to_have_count(2)  # the pages of each node, in words
    row = page.get_by_role("list", name="Requests, newest first").get_by_role("button")
    for stage in ("tokenize", "submit", "queue", "prefill", "transfer", "send", "decode"):
        expect(row).to_have_accessible_name(re.compile(rf"\b{stage} [\d.]+ m?s"))
    nameless = page.evaluate(
        "() => [...document.querySelectorAll('input, textarea, button')]"
        ".filter((e) => !e.labels?.length && !e.textContent.trim()).length"
    )
    assert nameless == 0
