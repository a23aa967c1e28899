"""A MIXED step takes twice a DECODE step at the most, whatever tokens cost, and not much less than it may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.mixing import MixingBudget

PAGE, BUDGET = 4, 1024
LEAST = BUDGET // 64
DECODE_S = 0.010

Cost = Callable[[int], float]  # prompt tokens beside decoding -> seconds


def affine(fixed: float, token: float) -> Cost:
    """`fixed` and `token` in DECODE steps: what a MIXED step costs beside one, and each of its tokens."""
    return lambda tokens: DECODE_S * (1 + fixed + token * tokens)


def roofline(token: float) -> Cost:
    """Tokens cost nothing as long as the reading of the weights takes longer."""
    return lambda tokens: DECODE_S * max(1.0, token * tokens)


COSTS = st.one_of(
    st.builds(affine, st.floats(0, 0.4), st.floats(1e-4, 0.05)), st.builds(roofline, st.floats(1e-3, 0.1))
)


def learned(decode_s: float = DECODE_S) -> MixingBudget:
    budget = MixingBudget(PAGE, BUDGET)
    for _ in range(3):
        budget.observe_decode(decode_s)
    return budget


def run(budget: MixingBudget, cost: Cost, steps: int, limit: int = BUDGET) -> list[int]:
    """Give prompts whole pages, `limit` tokens at most; returns the tokens of each MIXED step."""
    chunks = []
    for _ in range(steps):
        tokens = min(budget.next_chunk() // PAGE * PAGE, limit)
        if tokens == 0:
            budget.observe_decode(DECODE_S)
            continue
        chunks.append(tokens)
        budget.observe_mixed(cost(tokens), tokens)
    return chunks


def optimum(cost: Cost) -> int:
    """The longest chunk that keeps the limit, or the least one."""
    return max((n for n in range(LEAST, BUDGET + 1, PAGE) if cost(n) <= 2 * DECODE_S), default=LEAST)


@given(cost=COSTS)
def test_a_decode_step_is_at_most_doubled_and_little_is_given_away(cost: Cost) -> None:
    chunks = run(learned(), cost, 100)
    over = [n for n in chunks if n > optimum(cost)]
    assert set(over) <= {optimum(cost) + PAGE}, "where all is flat and then steep, a page too many is tried"
    assert len(over) <= 4, "once for every measure of D"
    assert min(chunks[20:]) >= optimum(cost) // 2


@given(token=st.floats(1e-4, 0.05), fixed=st.floats(0, 1))
def test_a_cost_that_grows_evenly_is_never_misjudged(token: float, fixed: float) -> None:
    cost = affine(fixed, token)
    assert max(run(learned(), cost, 100)) <= optimum(cost)


@given(cost=COSTS, limits=st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_short_ends_of_prompts_mislead_nobody(cost: Cost, limits: list[int]) -> None:
    budget = learned()
    before = run(budget, cost, 60)[-1]
    for limit in limits:
        run(budget, cost, 1, limit)
    assert before // 2 <= run(budget, cost, 2)[-1] <= optimum(cost) + PAGE


@pytest.mark.parametrize("slow", ["decode", "mixed"])
def test_one_slow_step_is_forgotten(slow: str) -> None:
    cost = affine(0, 1 / 200)
    budget = learned()
    usual = run(budget, cost, 20)[-1]
    if slow == "decode":
        budget.observe_decode(100 * DECODE_S)
    else:
        budget.observe_mixed(100 * DECODE_S, budget.next_chunk())
    first, *_, last = run(budget, cost, 20)
    assert usual // 2 - PAGE <= first <= usual
    assert last >= usual - PAGE


def test_where_nothing_keeps_the_limit_prompts_get_on_by_the_least_chunk() -> None:
    assert set(run(learned(), affine(5, 0.01), 20)) == {LEAST}


def test_a_small_budget_gives_a_page() -> None:
    budget = MixingBudget(16, 16)
    budget.observe_decode(DECODE_S)
    assert {budget.next_chunk() for _ in range(10)} == {16}


def test_cheap_tokens_are_bounded_by_the_budget() -> None:
    assert run(learned(), affine(0, 1e-6), 20)[-1] == BUDGET


def test_what_decoding_takes_is_measured_first_and_again() -> None:
    budget = MixingBudget(PAGE, BUDGET)
    assert budget.next_chunk() == budget.next_chunk() == 0
    budget.observe_decode(DECODE_S)
    given = [budget.next_chunk() for _ in range(100)]
    assert given[0] > 0
    assert 0 in given, "an old measure is taken again"
    assert set(given[given.index(0) :]) == {0}, "until it has been"


def test_it_follows_what_a_decode_step_takes() -> None:
    cost = affine(0, 1 / 100)
    budget = learned(DECODE_S / 4)  # few requests decoded then; now many do
    assert run(budget, cost, 300)[-1] >= 90
