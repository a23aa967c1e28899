"""What the rounds of `baton bench compare` say side by side, and how much of the machine others took."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.compare_figures import SHOWN, Comparison, table
from benchmarks.compare_load import Cell
from benchmarks.compare_servers import COLOCATED, DISAGGREGATED
from benchmarks.machine_use import MachineUse
from benchmarks.serve_figures import GoodLimits
from benchmarks.verdict import Verdict, judge


def cell(side: str, rate: float | None, round_: int, **figures: float) -> Cell:
    every = {rule.key: 10.0 for rule in SHOWN} | {"good": rate or 1.0, "answered": rate or 10.0} | figures
    return Cell(side, rate, round_, every, failed=0, num=10, client_cores=0.1, others=0.02)


def compared(changes: dict[tuple[str, float | None], dict[str, float]]) -> Comparison:
    cells = [
        cell(side, rate, round_, **changes.get((side, rate), {}))
        for round_ in range(3)
        for rate in (None, 2.0, 5.0, 9.0)
        for side in (DISAGGREGATED, COLOCATED)
    ]
    return Comparison([DISAGGREGATED, COLOCATED], [2.0, 5.0, 9.0], cells, GoodLimits(100, 10))


def test_latencies_of_the_deciding_rate_have_a_say_and_no_others() -> None:
    same = compared({(DISAGGREGATED, 2.0): {"itl_p99": 1.0}})
    assert same.deciding_rate == 9.0
    assert judge(same.evidence(0.1)).verdict is Verdict.NO_DIFFERENCE
    comparison = compared({(DISAGGREGATED, None): {"answered": 6.0}, (DISAGGREGATED, 5.0): {"itl_p99": 1.0}})
    assert comparison.deciding_rate == 5.0  # 9 is more than the disaggregated one takes
    figures = comparison.evidence(0.1).figures
    assert figures["itl_p99"].gain == pytest.approx(10)
    assert figures["capacity"].gain == pytest.approx(0.6)
    assert {(row.rate, row.rule.key) for row in comparison.rows() if row.has_say} == {
        *((5.0, key) for key in ("ttft_p50", "ttft_p90", "itl_p50", "itl_p99")),
        (None, "answered"),
    }


def test_best_goodput_may_be_at_different_rates() -> None:
    comparison = compared({(COLOCATED, 9.0): {"good": 1.0}})
    assert comparison.evidence(0.1).figures["goodput"].gain == pytest.approx(9 / 5)


def test_nothing_within_the_limits_is_said_as_it_is_and_still_compared() -> None:
    comparison = compared({(COLOCATED, rate): {"within": 0.0, "good": 0.0} for rate in (2.0, 5.0, 9.0)})
    assert comparison.mean(COLOCATED, 9.0, "within") == comparison.mean(COLOCATED, 9.0, "good") == 0.0
    rows = [row for row in comparison.rows() if row.rule.key == "within" and row.rate is not None]
    assert [row.values[COLOCATED] for row in rows] == [0.0] * 3
    judgement = judge(comparison.evidence(0.1))
    assert (judgement.verdict, judgement.rule) == (Verdict.DISAGGREGATE, 3)


def test_rounds_without_an_answer_leave_a_figure_out() -> None:
    comparison = compared({})
    comparison.cells = [
        Cell(c.side, c.rate, c.round_, {}, 10, 10, 0.1, 0.0) if c.side == COLOCATED else c
        for c in comparison.cells
    ]
    evidence = comparison.evidence(0.1)
    assert not evidence.figures
    assert judge(evidence).rule == 1
    assert "TTFT p50" in table(comparison.rows(), comparison.sides)


def test_table_has_a_line_for_each_figure_and_rate() -> None:
    comparison = compared({(DISAGGREGATED, 9.0): {"itl_p99": 5.0}})
    lines = table(comparison.rows(), comparison.sides).splitlines()
    assert len(lines) == 1 + 4 * (1 + len(SHOWN))
    (decides,) = (line for line in lines if line.split()[-2:] == ["1.00x", "better"])
    assert decides.split() == [
        "inter-token",
        "p99",
        "5",
        "ms",
        "10",
        "ms",
        "2.00x",
        "better",
        "1.00x",
        "better",
    ]


# The machine ----------------------------------------------------------------------------------------------


def test_others_are_all_but_us_and_our_children() -> None:
    cores = len(os.sched_getaffinity(0))
    before = MachineUse(at_s=10.0, all_s=100.0, ours_s=50.0)
    after = MachineUse(at_s=20.0, all_s=100.0 + 7 * cores, ours_s=50.0 + 4 * cores)
    assert after.others_since(before) == pytest.approx(0.3)
    work = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"
    ours_s = MachineUse.now().ours_s
    with subprocess.Popen(
        [sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert MachineUse.now().ours_s - ours_s >= 0.28  # in ticks of a hundredth
        child.communicate()
