"""When the page asks the server, and what it makes of the answers over time: under a clock of the test's."""

from __future__ import annotations

import itertools

from playwright.sync_api import Browser, Page, Route, expect

from tests.gateway.conftest import LiveServer
from tests.web.browser import Watched, opened

POLLED = ("/debug/kv", "/debug/requests", "/metrics", "/health")


def stop_clock(page: Page) -> None:
    """Let the page's timers go on only when they are told to."""
    page.clock.install(time=0)
    page.clock.pause_at(1000)


def test_it_asks_once_a_second_and_never_twice_at_a_time(watched: Watched) -> None:
    page = watched.page
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(page.url.rstrip("/"))))
    held: list[Route] = []
    stop_clock(page)
    page.goto("/")
    expect(page.locator("#status")).to_contain_text("live")
    assert sorted(path for path in asked if path in POLLED) == sorted(POLLED)
    page.route("**/debug/kv", lambda route: held.append(route))
    with page.expect_request("**/health"):  # the last of a round
        page.clock.run_for(1000)
    asked.clear()
    page.clock.run_for(5000)  # one answer is missing: nothing is asked again
    assert asked == []
    held.pop().fulfill(json={"nodes": [], "missing": ["late"]})
    expect(page.locator("#nodes [data-key=late]")).to_be_visible()
    with page.expect_request("**/health"):
        page.clock.run_for(1)  # the second is long over
    held.pop().fulfill(json={"nodes": [], "missing": ["later"]})
    expect(page.locator("#nodes [data-key=later]")).to_be_visible()
    assert sorted(asked) == sorted(POLLED)
    asked.clear()
    page.clock.run_for(900)
    assert asked == []


def test_it_says_when_nobody_answers_and_asks_less_often(chromium: Browser, server: LiveServer) -> None:
    with opened(chromium, server.url) as watched:
        page = watched.page
        stop_clock(page)
        page.goto("/")
        status = page.locator("#status")
        expect(status).to_contain_text("live from gateway-")
        page.route("**/*", lambda route: route.abort())
        page.clock.run_for(1000)
        for wait_s in (2, 4, 8, 15):
            expect(status).to_have_text(f"The server does not answer. Next try in {wait_s} s.")
            if wait_s == 15:
                page.unroute_all()
            page.clock.run_for(1000 * wait_s)
        expect(status).to_contain_text("live from gateway-")
        assert watched.strangers == []


def test_an_answer_of_something_else_is_said_and_another_model_is_seen(watched: Watched) -> None:
    page = watched.page
    stop_clock(page)
    page.goto("/")
    status = page.locator("#status")
    expect(status).to_contain_text("live")
    page.route("**/debug/kv", lambda route: route.fulfill(body="<html>a proxy's</html>"))
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "another"}]}))
    page.clock.run_for(1000)
    expect(status).to_have_text("The server's answer is not whole, or not Baton's. Next try in 2 s.")
    page.unroute("**/debug/kv")
    page.clock.run_for(2000)
    expect(status).to_contain_text("live")
    expect(page.locator("#model")).to_have_text("another")


def test_nobody_is_asked_while_nobody_looks(watched: Watched) -> None:
    page = watched.page
    page.add_init_script("Object.defineProperty(document, 'hidden', {get: () => window.isHidden ?? false})")
    stop_clock(page)
    page.goto("/")
    expect(page.locator("#status")).to_contain_text("live")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    turn = (
        "(isHidden) => { window.isHidden = isHidden; document.dispatchEvent(new Event('visibilitychange')); }"
    )
    page.evaluate(turn, True)
    page.clock.run_for(30_000)
    assert asked == []
    with page.expect_request("**/health"):  # at once, without a tick of the clock
        page.evaluate(turn, False)


def exposition(second: int) -> str:
    """What /metrics says after so many seconds; one node does not answer in the fifth."""
    lines = [
        f'baton_node_tokens_sampled_total{{node="decode-0",role="decode"}} {1000 + 100.0 * second}',
        f'baton_time_to_first_token_seconds_bucket{{le="0.1"}} {7.0}',
        f'baton_time_to_first_token_seconds_bucket{{le="0.2"}} {7.0 + 2 * second}',
        f'baton_time_to_first_token_seconds_bucket{{le="0.4"}} {7.0 + 4 * second}',
        f'baton_time_to_first_token_seconds_bucket{{le="+Inf"}} {7.0 + 4 * second}',
        'baton_node_failures_total{kind="pages_wrong",node="a\\"} 5\\\\b",role="decode"} 1.0',
        f'baton_failures_total{{kind="client_gone"}} {float(second)}',
        f'baton_requests_total{{outcome="success"}} {float(second)}',
    ]
    if second != 5:
        lines.append(
            f'baton_node_tokens_sampled_total{{node="decode-1",role="decode"}} {1e9 + 50.0 * second}'
        )
    return "# HELP x y\n" + "\n".join(lines) + "\n"


def test_rates_and_percentiles_are_of_what_happened_since(watched: Watched) -> None:
    page = watched.page
    seconds = itertools.count()
    page.route("**/metrics", lambda route: route.fulfill(body=exposition(next(seconds))))
    stop_clock(page)
    page.goto("/")
    figures = page.locator("#plots .plot")
    for second in range(13):
        expect(page.locator("#outcomes")).to_have_text(f"Requests that ended: {second} success")
        if second in (5, 8):  # decode-1 was not there now, or 3 s ago: what it had counted before is no rate
            expect(figures.nth(0).locator("b").first).to_have_text("100")
        page.clock.run_for(1000)
    expect(figures.nth(0).locator("b").first).to_have_text("150")
    # Of 4 a second, 2 took 0.1 to 0.2 s and 2 took 0.2 to 0.4: as histogram_quantile() has it.
    expect(figures.nth(1).locator("b")).to_have_text(["200 ms", "396 ms"])
    expect(figures.nth(2).locator("b")).to_have_text(["\u2013", "\u2013"])
    rows = page.locator("#failures tbody tr")
    expect(rows.nth(0).locator("th, td")).to_have_text(["client gone", "gateway", "13", "+13"])
    expect(rows.nth(1).locator("th, td")).to_have_text(["pages wrong", 'a"} 5\\b', "1", "\u2013"])
