"""More requests than pages: they wait in order and all finish; more than may wait are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.client import Client, greedy
from tests.system.oracle import Case, Oracle
from tests.system.server import running

pytestmark = pytest.mark.system

PAGE_SIZE = 16
NUM_PAGES = 20
MAX_QUEUED = 40


@pytest.fixture(scope="module")
def _client(model: Path) -> Iterator[Client]:
    options = {"--kv-pages": NUM_PAGES, "--max-queued": MAX_QUEUED, "--max-running": 3}
    with running(model, *(str(word) for option in options.items() for word in option)) as server:
        yield Client(server.url, server.model)


@pytest.fixture
def client(_client: Client) -> Iterator[Client]:
    yield _client
    _client.assert_ledger_clean()


def test_large_requests_take_turns_in_order(client: Client, oracle: Oracle, cases: list[Case]) -> None:
    # Each needs 13 of the 20 pages.
    case = oracle.case(cases[-3].prompt, 80)
    assert len(case.prompt) + 80 > PAGE_SIZE * NUM_PAGES // 2
    outcome = client.ask(greedy([case.prompt] * 12, 80, stream=True))
    assert outcome.succeeded
    assert outcome.order == sorted(outcome.order)
    assert outcome.token_ids == case.answer * 12


def test_many_sizes_at_once_all_finish(client: Client, cases: list[Case]) -> None:
    chosen = cases[:-2] * 2 + cases[-1:] * 3
    lengths = [16 if case is cases[-1] else 64 for case in chosen]
    bodies = [
        case.body(n, stream=i % 2 == 0) for i, (case, n) in enumerate(zip(chosen, lengths, strict=True))
    ]
    for case, n, outcome in zip(chosen, lengths, client.ask_all(bodies), strict=True):
        case.check(outcome, n)


def test_more_than_may_wait_are_refused_with_retry_after(client: Client, cases: list[Case]) -> None:
    prompts = [cases[-3].prompt] * (MAX_QUEUED + 10)
    for stream in (False, True):
        outcome = client.ask(greedy(prompts, 150, stream=stream))
        # A stream may have tokens out before the prompts behind them are refused: then an event says so.
        if outcome.status != 200 or not stream:
            assert outcome.status == 429
            assert int(outcome.headers["retry-after"]) > 0
        assert not outcome.succeeded
        assert outcome.error is not None
        assert outcome.error["type"] == "rate_limit_error"
        client.assert_ledger_clean()
    cases[0].check(client.ask(cases[0].body()))


def test_what_never_fits_is_refused_and_nothing_else_waits_for_it(client: Client, cases: list[Case]) -> None:
    room = NUM_PAGES * PAGE_SIZE
    for body, param in (
        (greedy([7] * room, 1), "prompt"),
        (greedy([7] * 100, room - 99), "max_tokens"),
    ):
        outcome = client.ask(body)
        assert (outcome.status, outcome.error and outcome.error["param"]) == (400, param)
        assert outcome.error is not None
        assert outcome.error["code"] == "context_length_exceeded"
    # What just fits is served; without max_tokens the answer is clipped to the pool.
    clipped = client.ask(greedy([7] * (room - 5), 5))
    assert len(clipped.token_ids) == 5
    open_ended = greedy([7] * (room - 9), 1)
    del open_ended["max_tokens"]
    assert len(client.ask(open_ended).token_ids) == 9
