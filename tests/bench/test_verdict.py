"""The verdict of `baton bench compare` follows from its figures by the rules, and from nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.advice import SetUp, advise
from benchmarks.verdict import (
    BALANCE,
    HELD,
    MOST_CLIENT_CORES,
    MOST_FAILED,
    MOST_OTHERS,
    RULES,
    Compared,
    Evidence,
    Finding,
    Judgement,
    Rule,
    Verdict,
    compare,
    deciding_rate,
    judge,
)

BY_KEY = {rule.key: rule for rule in RULES}
SERVED = {"disaggregated": 0.0, "colocated": 0.0}
VALUES = st.floats(1e-3, 1e6)
ROUNDS = st.integers(2, 6).flatmap(
    lambda n: st.tuples(st.lists(VALUES, min_size=n, max_size=n), st.lists(VALUES, min_size=n, max_size=n))
)
FIGURES = st.fixed_dictionaries({}, optional={rule.key: ROUNDS for rule in RULES})
MIRRORED = {Verdict.DISAGGREGATE: Verdict.DONT, Verdict.DONT: Verdict.DISAGGREGATE}


def figure(key: str, gain: float, noise: float = 1.01) -> Compared:
    """A figure by which the disaggregated server is better by a factor."""
    rule = BY_KEY[key]
    return Compared(rule, gain, 1.0, noise) if rule.more_is_better else Compared(rule, 1.0, gain, noise)


def evidence(*figures: Compared) -> Evidence:
    return Evidence({each.rule.key: each for each in figures}, SERVED, 0.1, 0.02)


def same_but(**gains: float) -> Evidence:
    """All figures the same, but for these."""
    return evidence(*(figure(key, gains.get(key, 1.0)) for key in BY_KEY))


def is_near(value: float, bound: float) -> bool:
    """So near that rounding decides on which side of it a value is."""
    return math.isclose(value, bound, rel_tol=1e-9)


def judged(rounds: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Judgement:
    return judge(evidence(*(compare(BY_KEY[key], *pair) for key, pair in rounds.items())))


# One figure -----------------------------------------------------------------------------------------------


def test_gain_is_above_1_where_the_disaggregated_server_is_better() -> None:
    assert compare(BY_KEY["itl_p99"], [10, 10], [20, 20]).gain == pytest.approx(2)
    assert compare(BY_KEY["capacity"], [10, 10], [20, 20]).gain == pytest.approx(0.5)


def test_noise_is_that_of_the_textbook() -> None:
    # Logarithms of the ratios 1 and 2: standard deviation ln 2 / sqrt 2; over sqrt 2 rounds; t is 12.706.
    assert math.log(compare(BY_KEY["itl_p50"], [1, 2], [1, 1]).noise) == pytest.approx(
        12.706 * math.log(2) / 2
    )
    # Four rounds, t(3) = 3.182; drift that hits both alike is no noise.
    assert compare(BY_KEY["itl_p50"], [1, 2, 3, 4], [2, 4, 6, 8]).noise == pytest.approx(1)


@pytest.mark.parametrize("rounds", [2, 3, 4, 8, 14])
def test_true_gain_is_within_the_noise_19_times_in_20(rounds: int) -> None:
    draw, tries, inside = np.random.default_rng(rounds), 2000, 0
    for _ in range(tries):
        ours, theirs = np.exp(draw.normal(0, 0.3, (2, rounds)))
        found = compare(BY_KEY["capacity"], (1.5 * ours).tolist(), theirs.tolist())
        inside += found.gain / found.noise <= 1.5 <= found.gain * found.noise
    assert inside / tries == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.key)
def test_difference_counts_from_the_threshold_on(rule: Rule) -> None:
    just, hardly = rule.threshold * 1.001, rule.threshold * 0.999
    assert figure(rule.key, just).finding is Finding.BETTER
    assert figure(rule.key, 1 / just).finding is Finding.WORSE
    assert figure(rule.key, hardly, 1.0001).finding is Finding.SAME
    assert figure(rule.key, 1.0).finding is Finding.SAME
    assert rule.why


def test_page_has_every_rule_with_its_threshold() -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    for rule in RULES:
        rows = [line for line in page.splitlines() if line.startswith(f"| {rule.name} |")]
        assert [row.split(" | ")[2:] for row in rows] == [[f"{rule.threshold:g}", f"{rule.why} |"]]
    for number in range(1, 7):
        assert f"\n| {number}. " in page
    for bound in (f"{100 * MOST_FAILED:g} % of a server", f"({100 * MOST_OTHERS:g}) % of the cores"):
        assert bound in page
    assert f"{BALANCE:g} times the largest" in page
    assert f"the client {MOST_CLIENT_CORES:g} of one" in page
    assert f"up to {HELD:g} of a server's capacity" in page


def test_difference_within_the_noise_is_unclear() -> None:
    assert figure("itl_p99", 2.0, 2.1).finding is Finding.UNCLEAR
    assert figure("itl_p99", 2.0, 1.9).finding is Finding.BETTER
    assert figure("itl_p99", 1.0, 1.3).finding is Finding.UNCLEAR  # it might be 1.3
    assert figure("itl_p99", 1.1, 1.2).finding is Finding.UNCLEAR  # it might be 1.32


@given(ROUNDS, st.sampled_from(RULES), st.floats(0.01, 100))
def test_comparison_is_fair(pair: tuple[list[float], list[float]], rule: Rule, scale: float) -> None:
    one, other = compare(rule, *pair), compare(rule, pair[1], pair[0])
    assert one.gain == pytest.approx(1 / other.gain)
    assert one.noise == pytest.approx(other.noise)
    scaled = compare(rule, *([scale * value for value in values] for values in pair))
    assert scaled.gain == pytest.approx(one.gain)
    factor = max(one.gain, 1 / one.gain)
    match one.finding:
        case Finding.BETTER | Finding.WORSE:
            assert factor >= rule.threshold
            assert factor >= one.noise
        case Finding.SAME:
            assert factor * one.noise < rule.threshold
        case Finding.UNCLEAR:
            assert factor * one.noise >= rule.threshold


# The verdict ----------------------------------------------------------------------------------------------


@given(FIGURES)
def test_verdict_is_mirrored_when_the_servers_change_places(
    rounds: dict[str, tuple[list[float], list[float]]],
) -> None:
    factors = [max(c.gain, 1 / c.gain) for c in (compare(BY_KEY[key], *rounds[key]) for key in rounds)]
    for key, pair in rounds.items():
        found = compare(BY_KEY[key], *pair)
        factor = max(found.gain, 1 / found.gain)
        assume(not any(map(is_near, (factor, factor * found.noise), (found.rule.threshold,) * 2)))
        assume(not is_near(factor, found.noise))
        assume(not any(is_near(factor, BALANCE * each) for each in factors))
    one = judged(rounds)
    other = judged({key: (theirs, ours) for key, (ours, theirs) in rounds.items()})
    assert other.verdict is MIRRORED.get(one.verdict, one.verdict)
    assert other.rule == one.rule
    assert one.reason


@given(FIGURES, st.floats(0.0101, 1), st.sampled_from(sorted(SERVED)))
def test_failures_leave_everything_open(
    rounds: dict[str, tuple[list[float], list[float]]], share: float, server: str
) -> None:
    figures = {key: compare(BY_KEY[key], *pair) for key, pair in rounds.items()}
    judgement = judge(Evidence(figures, SERVED | {server: share}, 0.1))
    assert (judgement.verdict, judgement.rule) == (Verdict.CANNOT_TELL, 1)
    assert server in judgement.reason


@given(FIGURES)
def test_no_verdict_without_a_figure_that_speaks_for_it(
    rounds: dict[str, tuple[list[float], list[float]]],
) -> None:
    findings = {compare(BY_KEY[key], *pair).finding for key, pair in rounds.items()}
    match judged(rounds).verdict:
        case Verdict.DISAGGREGATE:
            assert Finding.BETTER in findings
        case Verdict.DONT:
            assert Finding.WORSE in findings
        case Verdict.NO_DIFFERENCE:
            assert findings
            assert findings <= {Finding.SAME} or {Finding.BETTER, Finding.WORSE} <= findings
        case Verdict.CANNOT_TELL:
            assert Finding.UNCLEAR in findings or not rounds


def test_busy_machine_and_busy_client_leave_everything_open() -> None:
    clear = {"itl_p99": figure("itl_p99", 5.0)}
    busy = judge(Evidence(clear, SERVED, 0.1, others=0.11))
    assert (busy.verdict, busy.rule) == (Verdict.CANNOT_TELL, 2)
    assert "other programs took 11 %" in busy.reason
    assert judge(Evidence(clear, SERVED, 0.1, others=0.11, most_others=0.2)).verdict is Verdict.DISAGGREGATE
    assert judge(Evidence(clear, SERVED, 0.1, others=0.09)).verdict is Verdict.DISAGGREGATE
    assert judge(Evidence(clear, SERVED, 0.1, others=None)).verdict is Verdict.DISAGGREGATE
    client = judge(Evidence(clear, SERVED, 0.85))
    assert (client.verdict, client.rule) == (Verdict.CANNOT_TELL, 2)
    assert "client" in client.reason


def test_goodput_decides_whatever_else_differs() -> None:
    better = judge(same_but(goodput=1.5, itl_p99=0.2, ttft_p50=0.5))
    assert (better.verdict, better.rule) == (Verdict.DISAGGREGATE, 3)
    worse = judge(same_but(goodput=0.5, itl_p99=8.0))
    assert (worse.verdict, worse.rule) == (Verdict.DONT, 3)


def test_figures_of_one_kind_decide() -> None:
    judgement = judge(same_but(itl_p99=2.1))
    assert (judgement.verdict, judgement.rule) == (Verdict.DISAGGREGATE, 4)
    assert judgement.reason == "inter-token p99 2.1x better"
    judgement = judge(same_but(capacity=0.8))
    assert (judgement.verdict, judgement.rule) == (Verdict.DONT, 4)
    assert judgement.reason == "capacity -20 %"


def test_larger_factor_decides_where_it_is_larger_by_enough() -> None:
    judgement = judge(same_but(itl_p99=2.1, ttft_p50=1 / 1.3, capacity=0.8))
    assert (judgement.verdict, judgement.rule) == (Verdict.DISAGGREGATE, 5)
    assert judgement.reason.endswith("inter-token p99 2.1x better; but TTFT p50 1.3x worse, capacity -20 %")
    assert judge(same_but(itl_p99=1.3, ttft_p90=1 / 1.7)).verdict is Verdict.DONT
    assert judge(same_but(itl_p99=1.5, ttft_p90=1 / 1.5)).verdict is Verdict.NO_DIFFERENCE
    edge = 1.5 * BALANCE
    assert judge(same_but(itl_p99=edge * 1.001, ttft_p90=1 / 1.5)).verdict is Verdict.DISAGGREGATE
    assert judge(same_but(itl_p99=edge * 0.999, ttft_p90=1 / 1.5)).verdict is Verdict.NO_DIFFERENCE


def test_same_everywhere_is_no_difference_and_noise_is_no_answer() -> None:
    assert judge(same_but()).verdict is Verdict.NO_DIFFERENCE
    noisy = judge(evidence(figure("itl_p99", 1.6, 2.0), figure("capacity", 1.0)))
    assert (noisy.verdict, noisy.rule) == (Verdict.CANNOT_TELL, 6)
    assert "noise is larger than the difference: inter-token p99 1.6x better (noise 2x)" in noisy.reason
    assert judge(evidence()).verdict is Verdict.CANNOT_TELL


def test_latencies_count_at_the_highest_rate_that_both_hold() -> None:
    assert deciding_rate([1.0, 2.0, 3.0], [3.0, 9.0]) == 2.0
    assert deciding_rate([1.0, 2.0, 3.0], [3.2, 9.0]) == 3.0
    assert deciding_rate([1.0, 2.0], [0.5, 9.0]) is None


# Advice ---------------------------------------------------------------------------------------------------

CPU, TWO_GPUS, FOUR_GPUS = SetUp(0, 1, 1, 4), SetUp(2, 1, 1, 4), SetUp(4, 2, 2, 4)


@pytest.mark.parametrize(
    ("found", "set_up", "words"),
    [
        (same_but(capacity=0.5), CPU, ["--colocated"]),
        (same_but(itl_p99=2.0, ttft_p50=0.7), CPU, ["--prefill-budget"]),
        (same_but(itl_p99=1.3, itl_p50=2.0, ttft_p50=0.7), CPU, []),  # not that much to give away
        (same_but(itl_p99=2.0, ttft_p50=0.7), TWO_GPUS, ["one GPU more, --prefill 2"]),
        (same_but(itl_p99=2.0, ttft_p50=0.7), FOUR_GPUS, ["--prefill 3 --decode 1"]),
        (same_but(itl_p99=0.7, ttft_p50=2.0), FOUR_GPUS, ["--prefill 1 --decode 3"]),
        (same_but(itl_p99=0.7, ttft_p50=2.0), SetUp(0, 2, 1, 4), ["(--prefill 1)"]),
        (same_but(itl_p99=2.0, capacity=0.8), CPU, ["share a device"]),
        (same_but(itl_p99=2.0, capacity=0.8), TWO_GPUS, []),
        (same_but(itl_p99=2.0), CPU, []),
        # Of servers that ran already nobody knows what they run on.
        (same_but(itl_p99=2.0, capacity=0.8), SetUp(0, 1, 1, 4, is_known=False), []),
        (same_but(itl_p99=0.7, capacity=0.8), SetUp(0, 2, 1, 4, is_known=False), ["--colocated"]),
        (same_but(), FOUR_GPUS, []),
        (evidence(figure("itl_p99", 1.6, 2.0)), CPU, ["--rounds 8"]),
        (Evidence({}, SERVED | {"colocated": 0.5}, 0.1), CPU, ["log"]),
        (Evidence({}, SERVED, 0.1, 0.5), CPU, ["stop what else runs"]),
    ],
)
def test_advice_is_given_where_a_figure_supports_it(found: Evidence, set_up: SetUp, words: list[str]) -> None:
    lines = advise(judge(found), found, set_up)
    assert len(lines) == len(words)
    for line, word in zip(lines, words, strict=True):
        assert word in line
