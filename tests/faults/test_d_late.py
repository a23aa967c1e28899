"""Rows B7 and D of the catalogue: what comes late does no harm, and pages rest while somebody may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.world import D, P, World, world
from tests.faults.world_cases import CLEAN_WITHIN_S, check_answer, check_next, prompt
from tests.faults.world_engines import Sizes
from tests.faults.world_line import Fault, Rule
from tests.faults.world_states import LONG, PLANES, between_chunks_of

STOPPED_S = 60.0


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("kind", ["Chunk", "Commit"])
def test_d1_news_of_an_aborted_transfer_a_second_later_is_counted_and_dropped(
    tiny_model: Path, plane: str, kind: str
) -> None:
    with world(tiny_model, plane=plane) as w:
        rule = w.add(Rule((P, D), kind, Fault.HELD))
        asked = w.ask(LONG, 8)
        w.until(lambda: rule.fired == 1)
        w.abort(asked)
        w.until(w.is_clean, CLEAN_WITHIN_S)
        w.run(1.0)
        w.release(rule)
        w.until(lambda: w.counter("messages_late") == 1)
        w.two_statuses()
        assert w.is_clean()
        check_next(tiny_model, w)


def stop_in_mid_transfer(w: World) -> None:
    """P is stopped with some pages sent; the client leaves."""
    asked = w.ask(LONG, 8)
    between_chunks_of(w, asked)
    w.abort(asked)
    w.until(lambda: w.passed((D, P), "Abort") == 1)


def test_b7_pages_of_an_aborted_transfer_are_given_to_nobody_while_p_may_write_them(tiny_model: Path) -> None:
    with world(tiny_model, plane="shm", sizes=Sizes(d_pages=8)) as w:
        stop_in_mid_transfer(w)
        assert w.ledgers()[0].quarantined == 7
        second = w.ask(prompt(5, 100), 8)  # it needs these very pages
        w.run(1.0)
        assert w.passed((D, P), "Prefill") == 1
        w.held.discard(P)  # it writes on, and reads the Abort later
        w.until_ended(second)
        check_answer(tiny_model, second)
        w.until(w.is_clean, CLEAN_WITHIN_S)


def test_b7_pages_that_d_places_itself_are_free_at_once_and_late_bytes_go_nowhere(tiny_model: Path) -> None:
    with world(tiny_model, plane="frames", sizes=Sizes(d_pages=8)) as w:
        rule = w.add(Rule((P, D), "Chunk", Fault.HELD, nth=2))
        first = w.ask(LONG, 8)
        w.until(lambda: rule.fired == 1)
        w.abort(first)
        second = w.ask(prompt(5, 100), 8)  # it needs the same pages
        w.until(lambda: len(second.tokens) > 1)
        w.release(rule)  # a chunk of the first comes while the second decodes over them
        w.until_ended(second)
        check_answer(tiny_model, second)
        assert w.counter("messages_late") > 0
        w.until(w.is_clean, CLEAN_WITHIN_S)


def test_d6_no_time_is_long_enough_to_free_what_a_stopped_p_may_write(tiny_model: Path) -> None:
    with world(tiny_model, plane="shm") as w:
        stop_in_mid_transfer(w)
        for _ in range(6):
            w.run(STOPPED_S / 6)
            assert w.ledgers()[0].quarantined == 7
        w.held.discard(P)
        w.until(w.is_clean, CLEAN_WITHIN_S)
        asked = [w.ask(prompt(seed, 20 + seed), 4) for seed in range(1, 31)]
        w.until_ended(*asked)
        for each in asked:
            check_answer(tiny_model, each)
        w.until(w.is_clean, CLEAN_WITHIN_S)


@pytest.mark.parametrize("plane", PLANES)
def test_d6_a_stopped_p_does_not_hold_up_those_that_decode(tiny_model: Path, plane: str) -> None:
    with world(tiny_model, plane=plane) as w:
        running = w.ask(prompt(3, 30), 40)
        w.until(lambda: len(running.tokens) > 2)
        stop_in_mid_transfer(w)
        w.until_ended(running)
        check_answer(tiny_model, running)
        w.held.discard(P)
        w.until(w.is_clean, CLEAN_WITHIN_S)
        check_next(tiny_model, w)
