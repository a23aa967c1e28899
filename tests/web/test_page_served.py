"""The page of a real server under a little load: what it shows is what the server says."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gateway.page_files import FOLDER
from tests.system.server import Server, running
from tests.tiny import write_tiny_model
from tests.web.browser import Watched, opened

pytestmark = pytest.mark.system
STAGES = ("tokenize", "submit", "queue", "prefill", "transfer", "send", "decode")
NUM_STREAMS = 4
CONTEXT = 16384  # an answer of that length takes longer than a test
# The series that the page reads, each with the labels that it reads.
READ = {
    "baton_time_to_first_token_seconds_bucket": {"le"},
    "baton_inter_token_latency_seconds_bucket": {"le"},
    "baton_node_tokens_sampled_total": {"node"},
    "baton_node_tokens_computed_total": {"node"},
    "baton_node_requests_running": {"node"},
    "baton_node_requests_queued": {"node"},
    "baton_failures_total": {"kind"},
    "baton_node_failures_total": {"kind", "node"},
    "baton_requests_total": {"outcome"},
}
PLOTTED = list(READ)[:4]
# What the page has drawn: for each row its key, its stages' ms, and how wide they are on the screen.
DRAWN = """() => [...document.querySelectorAll('#rows li')].map((item) => ({
  key: item.dataset.key,
  state: item.querySelector('.what').textContent,
  stages: [...item.querySelectorAll('rect')].map((rect) => [
    rect.dataset.stage, Number(rect.dataset.ms), rect.getBoundingClientRect().width]),
}))"""
# Keeps every text that the answer had on its way.
WATCH_ANSWER = """() => {
  window.texts = [];
  new MutationObserver(() => {
    const text = document.querySelector('#log .answer:last-child .text')?.textContent;
    if (text && text !== window.texts.at(-1)) window.texts.push(text);
  }).observe(document.querySelector('#log'), {subtree: true, childList: true, characterData: true});
}"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with its default nodes."""
    model = write_tiny_model(tmp_path_factory.mktemp("page"), max_position_embeddings=CONTEXT)
    with running(model, "--kv-pages", "4096") as server:
        yield server


@pytest.fixture
def watched(chromium: Browser, served: Server) -> Iterator[Watched]:
    """The page of the server."""
    with opened(chromium, served.url) as page:
        yield page
        page.assert_behaved()


@contextmanager
def load(url: str) -> Iterator[None]:
    """Have streams end and begin all the time."""
    over = threading.Event()

    def stream(number: int) -> None:
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        prompt, max_tokens = "the quick brown fox " * (20 + 60 * number), 40 + 20 * number
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        while not over.is_set():
            httpx.post(f"{url}/v1/completions", json=body | {"stream": True}, timeout=60)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def with_fields(page: Page, **fields: Any) -> None:
    """Add fields to what the chat asks for."""

    def add(route: Route) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | fields))

    page.route("**/v1/chat/completions", add)


def ask(page: Page, question: str) -> None:
    page.get_by_label("Message").fill(question)
    page.keyboard.press("Enter")


def requests(url: str) -> dict[str, dict[str, Any]]:
    """What the server says of its requests, by the page's keys."""
    answer = httpx.get(f"{url}/debug/requests").json()
    gateway = answer["gateway"]
    return {f"{gateway}/{one['id']}/{one['choice']}": one for one in answer["requests"]}


def test_the_waterfall_is_what_the_server_measured(watched: Watched, served: Server) -> None:
    page = watched.page
    with load(served.url):
        page.goto("/")
        expect(page.locator("#rows .row")).not_to_have_count(0)
        live = page.locator("#rows .row[data-state=live]").first
        expect(live).to_be_visible()
        expect(page.locator("#num-ended")).to_have_text(re.compile(r"^(1[2-9]|[2-9]\d|\d{3})$"))
        expect(page.locator("#plots .legend b").first).to_have_text(re.compile(r"\d"))
        nodes = page.locator("#nodes .card")
        expect(nodes).to_have_count(2)
        expect(nodes.first).to_contain_text("decode-0")
    expect(page.locator("#num-live")).to_have_text("0")
    page.get_by_label("at their start").check()
    drawn = page.evaluate(DRAWN)
    known = requests(served.url)
    assert len(drawn) >= 12
    for row in drawn:
        request = known[row["key"]]
        timings = request["timings"]
        assert row["state"] == request["finish_reason"] == "length"
        assert [stage for stage, _, _ in row["stages"]] == list(STAGES)
        for stage, shown_ms, _ in row["stages"]:
            assert shown_ms == pytest.approx(timings[f"{stage}_ms"], abs=0.001)
        # What is long looks long: all widths have one scale.
        total_px = sum(width for _, _, width in row["stages"])
        for _, shown_ms, width in row["stages"]:
            assert width == pytest.approx(total_px * shown_ms / timings["total_ms"], abs=1)
    longest = max(drawn, key=lambda row: sum(width for _, _, width in row["stages"]))
    totals = {row["key"]: known[row["key"]]["timings"]["total_ms"] for row in drawn}
    assert totals[longest["key"]] == max(totals.values())
    page.locator("#rows .row").first.hover()
    detail = page.locator("#detail")
    first = known[drawn[0]["key"]]
    expect(detail).to_contain_text(first["id"])
    expect(detail).to_contain_text(f"{first['prompt_tokens']:,} prompt tokens")
    expect(detail).to_contain_text("prefill-0 → decode-0")


def test_the_metrics_that_it_reads_are_there(served: Server) -> None:
    scripts = "".join(text for path in FOLDER.glob("*.js") if "baton_" in (text := path.read_text()))
    assert set(re.findall(r"\bbaton_\w+", scripts)) == {name.removesuffix("_bucket") for name in READ}
    assert set(re.findall(r"\blabels\.(\w+)", scripts)) == set().union(*READ.values())
    model = httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "the quick brown fox", "max_tokens": 4, "ignore_eos": True}
    assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code == 200
    families = text_string_to_metric_families(httpx.get(f"{served.url}/metrics").text)
    found: dict[str, list[Sample]] = {}
    for sample in (sample for family in families for sample in family.samples):
        found.setdefault(sample.name, []).append(sample)
    for name, labels in READ.items():
        assert found.get(name), name
        assert all(labels <= sample.labels.keys() for sample in found[name]), name
    # A name that no node counts would be 0 for ever: the plots would be flat.
    for name in PLOTTED:
        assert sum(sample.value for sample in found[name]) > 0, name


def test_an_answer_arrives_in_parts_with_its_timeline(watched: Watched, served: Server) -> None:
    page = watched.page
    with_fields(page, max_tokens=1000, ignore_eos=True)
    page.goto("/")
    page.evaluate(WATCH_ANSWER)
    with page.expect_response("**/v1/chat/completions") as answered:
        ask(page, "what do you see?")
    timeline = page.locator("#log .answer .timeline")
    expect(timeline.locator("dl")).to_be_visible()
    lines = [line.removeprefix("data: ") for line in answered.value.text().split("\n\n") if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    texts = page.evaluate("window.texts")
    assert texts[-1] == "".join(deltas)
    assert len(texts) > 3
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    (timings,) = [event["timings"] for event in events if event.get("timings")]
    shown = timeline.locator("rect").evaluate_all(
        "rects => rects.map((rect) => [rect.dataset.stage, Number(rect.dataset.ms)])"
    )
    assert dict(shown) == pytest.approx({s: timings[f"{s}_ms"] for s in STAGES[:-1]}, abs=0.001)
    expect(timeline).to_contain_text("1,000 tokens in")
    expect(timeline).to_contain_text("prefill-0 → decode-0")


def test_a_live_answer_grows_and_ends_when_it_is_stopped(watched: Watched, served: Server) -> None:
    page = watched.page
    with_fields(page, ignore_eos=True)
    page.goto("/")
    page.locator("#requests").get_by_label("live").check()
    ask(page, "tell me everything")
    expect(page.locator("#log .answer .text")).not_to_be_empty()
    live = page.locator("#rows .row[data-state=live]")
    expect(live).to_have_count(1)
    expect(live.locator(".what")).to_have_text("decoding")
    decode = live.locator("rect[data-stage=decode]")
    before = decode.get_attribute("data-ms")
    expect(decode).not_to_have_attribute("data-ms", before)
    assert float(decode.get_attribute("data-ms")) > float(before)
    pages = page.locator("#nodes .card", has_text="decode-0").get_by_role("img")
    expect(pages).to_have_accessible_name(re.compile(r"^[1-9]\d* active, 0 incoming"))
    with page.expect_response("**/debug/requests"):
        page.get_by_role("button", name="Stop", exact=True).click()
    expect(live).to_have_count(0)
    (stopped,) = [one for one in requests(served.url).values() if one["outcome"] == "client_gone"]
    assert stopped["endpoint"] == "/v1/chat/completions"
    timeline = page.locator("#log .answer .timeline")
    expect(timeline).to_contain_text("Stopped.")
    expect(timeline.locator("dl")).to_be_visible()
    expect(timeline).to_contain_text(f"{stopped['output_tokens']:,} tokens in")
    page.locator("#requests").get_by_label("all").check()
    expect(page.locator(f'#rows li[data-key$="{stopped["id"]}/0"]')).to_contain_text("client gone")
    expect(page.locator("#failures tbody")).to_contain_text("client gone")
