"""The service equals transformers, token for token, however it is set up; alone, and all at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.client import Client, Outcome
from tests.system.oracle import Case
from tests.system.server import running

pytestmark = pytest.mark.system

# With the two shared servers (pages of 16), every pair of page size, overlap and way of prefilling.
SET_UPS = {
    "page 1, overlapped": ("--page-size", "1", "--overlap", "on"),
    "page 1, plain, colocated": ("--page-size", "1", "--overlap", "off", "--colocated"),
    "page 64, overlapped": ("--page-size", "64", "--overlap", "on"),
    "page 64, plain, colocated": ("--page-size", "64", "--overlap", "off", "--colocated"),
}


def check_alone_and_together(client: Client, cases: list[Case]) -> None:
    for case in cases:
        case.check(client.ask(case.body()))
    # Not in the order of length, some streamed, and with answers of different lengths.
    draw = random.Random(7)
    chosen = draw.sample(cases * 2, 2 * len(cases))
    lengths = [draw.choice((1, 2, 17, 64)) for _ in chosen]
    bodies = [
        case.body(length, stream=bool(i % 2))
        for i, (case, length) in enumerate(zip(chosen, lengths, strict=True))
    ]
    for case, length, outcome in zip(chosen, lengths, client.ask_all(bodies), strict=True):
        case.check(outcome, length)


def test_pair(pair: Client, cases: list[Case]) -> None:
    check_alone_and_together(pair, cases)


def test_colocated(colocated: Client, cases: list[Case]) -> None:
    check_alone_and_together(colocated, cases)


@pytest.fixture(params=SET_UPS)
def client(request: pytest.FixtureRequest, model: Path) -> Iterator[Client]:
    with running(model, *SET_UPS[request.param]) as server:
        client = Client(server.url, server.model)
        yield client
        client.assert_ledger_clean()


def test_set_up(client: Client, cases: list[Case]) -> None:
    check_alone_and_together(client, cases)


async def wait_for_tokens(outcomes: list[Outcome]) -> None:
    """Wait until every stream has brought something."""
    while not all(outcome.token_ids for outcome in outcomes):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_prompts_that_come_while_others_decode(model: Path, cases: list[Case], overlap: str) -> None:
    """One node computes them in the same steps: neither changes the other."""

    async def stream(client: Client) -> list[tuple[Case, Outcome]]:
        asked: list[tuple[Case, Outcome]] = []
        async with client.session() as http, asyncio.TaskGroup() as group:
            for wave in (cases[::2], cases[::-1], cases[1::2]):
                started = [(case, Outcome()) for case in wave]
                for case, outcome in started:
                    group.create_task(client.follow(http, case.body(stream=True), outcome))
                asked += started
                await wait_for_tokens([outcome for _, outcome in started[:2]])
        return asked

    with running(model, "--colocated", "--overlap", overlap) as server:
        client = Client(server.url, server.model)
        for case, outcome in asyncio.run(stream(client)):
            case.check(outcome)
        client.assert_ledger_clean()
