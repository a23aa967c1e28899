"""The same seed draws the same tokens: alone, in a batch, by two nodes or by one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.client import Body, Client
from tests.system.oracle import Case

pytestmark = pytest.mark.system

VARIANTS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"top_p": 0.8, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_p": 0.95},
    {"seed": -1},
]


@pytest.fixture(scope="module")
def bodies(cases: list[Case]) -> list[Body]:
    return [
        case.body(32, **{"temperature": 1, "seed": 1000 + i, **variant})
        for i, (case, variant) in enumerate(zip(cases[-8:], VARIANTS, strict=True))
    ]


def test_seed_draws_the_same_anywhere(pair: Client, colocated: Client, bodies: list[Body]) -> None:
    alone = [pair.ask(body).token_ids for body in bodies]
    assert [len(tokens) for tokens in alone] == [32] * 8
    assert [outcome.token_ids for outcome in pair.ask_all(bodies)] == alone
    assert [outcome.token_ids for outcome in colocated.ask_all(bodies)] == alone
    assert [colocated.ask(body).token_ids for body in bodies] == alone


def test_another_seed_draws_other_tokens(pair: Client, bodies: list[Body]) -> None:
    seeds = [pair.ask(bodies[0] | {"seed": seed}).token_ids for seed in range(5)]
    unseeded = [pair.ask(bodies[0] | {"seed": None}).token_ids for _ in range(3)]
    assert len({tuple(tokens) for tokens in seeds + unseeded}) == 8


def test_filters_that_leave_one_token_are_greedy(pair: Client, cases: list[Case]) -> None:
    case = cases[5]
    for variant in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        case.check(pair.ask(case.body(temperature=1, **variant)))
