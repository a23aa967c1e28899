"""The service equals transformers, token for token, however it is set up; alone, and all at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.client import Client
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
