"""Rows A of the catalogue: a client that leaves costs no page and no computing, wherever its request is."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_node.entry import Phase
from tests.faults.world import D, G, P, world
from tests.faults.world_cases import CLEAN_WITHIN_S, check_answer, check_next, prompt
from tests.faults.world_engines import Sizes
from tests.faults.world_line import Fault, Rule
from tests.faults.world_states import LONG, PLANES, abort_p, between_chunks_of, queued_on_p
from tests.tiny import write_tiny_model


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like the tiny model, with room for 8,192 tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("long"), max_position_embeddings=8192)


@pytest.mark.parametrize("plane", PLANES)
def test_a1_a_client_that_leaves_before_d_reads_the_commit_holds_nothing_at_p(
    tiny_model: Path, plane: str
) -> None:
    with world(tiny_model, plane=plane) as w:
        asked = w.ask(LONG, 8)
        w.until(lambda: w.passed((D, P), "Prefill") == 1)
        w.held.add(D)
        w.until(lambda: w.passed((P, D), "Commit") == 1)
        w.abort(asked)
        d, p = w.ledgers()
        assert (d.incoming, p.free) == (7, p.total)  # P has not waited for D
        w.held.discard(D)
        w.until(w.is_clean, CLEAN_WITHIN_S)
        check_next(tiny_model, w)


def test_a2_an_abort_while_queued_on_d_leaves_nothing_at_p(tiny_model: Path) -> None:
    with world(tiny_model, sizes=Sizes(d_pages=12)) as w:
        first = w.ask(prompt(2, 100), 60)
        w.until(lambda: w.phase(first) is Phase.RUNNING)
        second = w.ask(prompt(3, 100), 60)
        w.until(lambda: w.phase(second) is Phase.QUEUED)
        w.abort(second)
        w.until(lambda: w.phase(second) is None, CLEAN_WITHIN_S)
        w.until_ended(first)
        check_answer(tiny_model, first)
        assert w.passed((D, P), "Prefill") == 1  # P never heard of the second
        w.until(w.is_clean, CLEAN_WITHIN_S)
        check_next(tiny_model, w)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("kind", ["Quiesced", "Abort"])
def test_a4_a_lost_answer_to_an_abort_is_asked_for_again(tiny_model: Path, plane: str, kind: str) -> None:
    with world(tiny_model, plane=plane) as w:
        rule = w.add(Rule((P, D) if kind == "Quiesced" else (D, P), kind, Fault.LOST))
        asked = w.ask(LONG, 8)
        between_chunks_of(w, asked)
        w.abort(asked)
        w.until(lambda: w.passed((G, D), "Abort") == 1)
        w.held.discard(P)
        w.until(lambda: rule.fired == 1 and w.is_clean(), CLEAN_WITHIN_S)
        check_next(tiny_model, w)


def test_a6_an_abort_between_received_and_running_frees_the_pages(tiny_model: Path) -> None:
    with world(tiny_model, sizes=Sizes(max_running=1)) as w:
        first = w.ask(prompt(2, 20), 40)
        w.until(lambda: w.phase(first) is Phase.RUNNING)
        second = w.ask(LONG, 40)
        w.until(lambda: w.passed((D, P), "Prefill") == 2)
        w.held.add(D)  # the first goes on when all of the second has come
        w.until(lambda: w.passed((P, D), "Commit") == 2)
        w.held.discard(D)
        w.until(lambda: w.phase(second) is Phase.ARRIVED)
        assert len(second.tokens) <= 1
        w.abort(second)
        w.until(lambda: w.phase(second) is None, CLEAN_WITHIN_S)
        third = w.ask(prompt(4, 30), 5)  # it takes the place of the second
        w.until_ended(first, third)
        check_answer(tiny_model, first)
        check_answer(tiny_model, third)
        w.until(w.is_clean, CLEAN_WITHIN_S)


@pytest.mark.parametrize("plane", PLANES)
def test_a8_an_abort_while_queued_on_p_is_never_computed(tiny_model: Path, plane: str) -> None:
    with world(tiny_model, plane=plane, sizes=Sizes(p_pages=3)) as w:
        reached = queued_on_p(w)
        w.abort(reached.asked)
        reached.go_on()
        w.until_ended(*reached.others)
        check_answer(tiny_model, reached.others[0])
        w.until(w.is_clean, CLEAN_WITHIN_S)
        assert w.counter("tokens_computed") == len(reached.others[0].prompt)
        check_next(tiny_model, w)


@pytest.mark.parametrize("overlap", [False, True])
def test_a10_after_a_cancelled_long_prompt_p_computes_the_next_one_at_once(
    long_model: Path, overlap: bool
) -> None:
    budget = 128
    sizes = Sizes(d_pages=520, p_pages=520, budget=budget)
    with world(long_model, sizes=sizes, overlap=overlap) as w:
        long = w.ask(prompt(1, 8000), 8)
        w.until(lambda: w.counter("tokens_computed") >= 2 * budget)
        launched = w.counter("tokens_computed")  # the last chunk of it is in flight
        go_on = abort_p(w)
        w.abort(long)
        short = w.ask(prompt(2, 20), 4)
        go_on()
        w.until(lambda: bool(short.tokens))
        assert w.counter("tokens_computed") <= launched + budget + 20
        w.until_ended(short)
        check_answer(long_model, short)
        w.until(w.is_clean, CLEAN_WITHIN_S)


def test_a15_an_abort_that_comes_to_d_before_its_request_is_remembered(tiny_model: Path) -> None:
    with world(tiny_model) as w:
        rule = w.add(Rule((G, D), "Submit", Fault.HELD))
        asked = w.ask(LONG, 8)
        w.until(lambda: rule.fired == 1)
        w.abort(asked)
        w.until(lambda: w.passed((G, D), "Abort") == 1)
        w.release(rule)
        w.until(lambda: w.counter("requests_submitted") == 1)
        w.two_statuses()
        assert w.passed((D, P), "Prefill") == 0
        assert w.is_clean()
        check_next(tiny_model, w)


@pytest.mark.parametrize("plane", PLANES)
def test_a15_an_abort_that_comes_to_p_before_its_request_is_remembered(tiny_model: Path, plane: str) -> None:
    with world(tiny_model, plane=plane) as w:
        rule = w.add(Rule((D, P), "Prefill", Fault.HELD))
        asked = w.ask(LONG, 8)
        w.until(lambda: rule.fired == 1)
        w.abort(asked)
        w.until(lambda: w.passed((P, D), "Quiesced") == 1)
        w.release(rule)
        w.until(lambda: w.counter("aborts_before_request") == 1)
        w.two_statuses()
        assert w.counter("tokens_computed") == 0
        assert w.is_clean()
        check_next(tiny_model, w)
