"""Rows F of the catalogue: one lost notice is no hang, and too much work is refused, not piled up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.world import D, G, P, world
from tests.faults.world_cases import CLEAN_WITHIN_S, answer, check_answer, check_next, prompt
from tests.faults.world_engines import Sizes
from tests.faults.world_line import Fault, Rule
from tests.faults.world_states import LONG, PLANES


@pytest.mark.parametrize("plane", PLANES)
def test_f6_a_lost_completion_is_found_and_the_hand_over_done_again(tiny_model: Path, plane: str) -> None:
    with world(tiny_model, plane=plane) as w:
        rule = w.add(Rule((P, D), "Commit", Fault.LOST))
        asked = w.ask(LONG, 8)
        w.until_ended(asked)
        check_answer(tiny_model, asked)
        assert (rule.fired, w.counter("transfers_failed")) == (1, 1)
        w.until(w.is_clean, CLEAN_WITHIN_S)
        check_next(tiny_model, w)


def test_f6_a_lost_end_is_told_as_an_error(tiny_model: Path) -> None:
    with world(tiny_model) as w:
        rule = w.add(Rule((D, G), "Tokens", Fault.LOST, nth=8))
        asked = w.ask(LONG, 8)
        w.until_ended(asked)
        assert rule.fired == 1
        assert asked.error is not None
        assert asked.error.status == 500
        assert asked.tokens == answer(tiny_model, LONG, 8)[:7]
        w.until(w.is_clean, CLEAN_WITHIN_S)
        check_next(tiny_model, w)


@pytest.mark.parametrize("plane", PLANES)
def test_f10_a_p_with_room_for_one_prompt_serves_twenty(tiny_model: Path, plane: str) -> None:
    with world(tiny_model, plane=plane, sizes=Sizes(p_pages=3, d_pages=128)) as w:
        asked = [w.ask(prompt(seed, 40), 6) for seed in range(20)]
        w.until_ended(*asked)
        for each in asked:
            check_answer(tiny_model, each)
        assert w.passed((D, P), "Prefill") == 20  # nothing was tried twice
        w.until(w.is_clean, CLEAN_WITHIN_S)


def test_f14_more_than_may_wait_is_refused_and_can_come_back(tiny_model: Path) -> None:
    with world(tiny_model, sizes=Sizes(max_running=1, max_queued=3, budget=16)) as w:
        asked = [w.ask(prompt(seed, 40), 30) for seed in range(12)]
        w.until_ended(*asked)
        refused = [each for each in asked if each.error is not None]
        assert refused
        assert {(each.error.status, each.error.retry_after_s) for each in refused if each.error} == {(429, 1)}
        assert len(refused) < len(asked)
        for each in asked:
            if each not in refused:
                check_answer(tiny_model, each)
        w.until(w.is_clean, CLEAN_WITHIN_S)
        check_next(tiny_model, w)
