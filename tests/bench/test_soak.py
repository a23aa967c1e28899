"""The soak's own judgement: what it calls right, allowed and wrong, and flat."""

from __future__ import annotations

import random
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.soak_accidents import Accidents
from benchmarks.soak_plot import Chart, draw
from benchmarks.soak_requests import Tally
from benchmarks.soak_watch import slope_per_minute
from common.faults import parse
from conformance.server import Server
from tests.system.test_logprobs_penalties import DEFAULTS, Case, Loop, Scored


@pytest.fixture(scope="module")
def loop(tiny_model: Path) -> Loop:
    return Loop(tiny_model)


@pytest.fixture(scope="module")
def case(loop: Loop) -> Case:
    body = DEFAULTS | {"prompt": [5, 90, 17], "presence_penalty": 1.0}
    return loop.case(body, body["prompt"])


def answered(case: Case, **changes: object) -> Scored:
    """A whole answer, right but for the changes."""
    usage = {"completion_tokens": len(case.tokens), "prompt_tokens": len(case.body["prompt"])}
    outcome = Scored(status=200, done=True, token_ids=list(case.tokens), finish=case.finish, usage=usage)
    outcome.logprobs = [None]
    for name, value in changes.items():
        setattr(outcome, name, value)
    return outcome


def judged(loop: Loop, case: Case, outcome: Scored, *, took_s: float = 0.1) -> str:
    tally = Tally()
    tally.judge(case, outcome, loop, timeout_s=1.0, took_s=took_s)
    (end,) = tally.ends
    assert bool(tally.wrong) is (end == "wrong")
    return end


def test_answers_are_held_against_the_oracle(loop: Loop, case: Case) -> None:
    assert judged(loop, case, answered(case)) == "right"
    assert judged(loop, case, answered(case, token_ids=[*case.tokens[:-1], 5])) == "wrong"
    assert judged(loop, case, answered(case, finish="stop")) == "wrong"
    assert judged(loop, case, answered(case, done=False)) == "wrong"  # cut off in silence


def test_errors_are_right_where_they_are_allowed(loop: Loop, case: Case) -> None:
    late, busy = {"code": "deadline_exceeded", "type": "x"}, {"code": None, "type": "x"}
    assert judged(loop, case, Scored(status=429, done=True, error=busy)) == "429"
    assert judged(loop, case, Scored(status=504, done=True, error=late), took_s=1.1) == "504"
    assert judged(loop, case, Scored(status=200, error=busy)) == "in a stream x"
    assert judged(loop, case, Scored(status=504, done=True, error=late)) == "wrong"  # too early
    assert judged(loop, case, Scored(status=200, done=True, error=busy)) == "wrong"  # looks whole
    assert judged(loop, case, Scored(status=500, done=True, error=busy)) == "wrong"
    assert judged(loop, case, Scored()) == "wrong"  # no answer at all


def test_every_rule_that_may_be_drawn_is_one(tmp_path: Path) -> None:
    accidents = Accidents(Server.__new__(Server), None, random.Random(1), True)  # type: ignore[arg-type]
    rules = [parse(accidents._rule()) for _ in range(500)]
    assert {rule.action for (rule,) in rules} >= {"drop", "double", "delay", "corrupt", "refuse", "barrier"}


def test_the_slope_is_that_of_the_second_half() -> None:
    assert slope_per_minute([(float(s), 100.0 + min(s, 60)) for s in range(240)]) == pytest.approx(0)
    assert slope_per_minute([(float(s), 0.5 * s) for s in range(240)]) == pytest.approx(30)
    assert slope_per_minute([(1.0, 5.0)]) == 0


def test_the_picture_is_a_picture() -> None:
    charts = [Chart("memory", {"a": [(0.0, 1.0), (9.0, 2.0)], "none": []}), Chart("nothing", {})]
    picture = ElementTree.fromstring(draw("soak", charts, [(3.0, "kill"), (5.0, "stop")], 10.0))
    assert len(picture.findall("{*}polyline")) == 2
