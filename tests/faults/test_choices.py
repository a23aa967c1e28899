"""Several choices of one prompt between a gateway, a decode node and a prefill node, and what goes wrong.

The oracle is the choice alone: a request of one choice with that number, in a world of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from common.messages import Commit
from common.request import SamplingParams
from decode_node.entry import Phase
from tests.faults.world import D, G, P, World, world
from tests.faults.world_asked import Asked
from tests.faults.world_cases import CLEAN_WITHIN_S, check_next, prompt
from tests.faults.world_engines import SIZES, Sizes
from tests.faults.world_line import Fault, Rule
from tests.faults.world_states import PLANES

N = 4
PROMPT = prompt(1, 100)  # six pages of 16 and a part of one
SEEDED = SamplingParams(12, temperature=1.0, seed=5, ignore_eos=True)


@cache
def alone(folder: Path, sampling: SamplingParams, length: int = len(PROMPT)) -> list[list[int]]:
    """What each choice is when it is asked for alone."""
    with world(folder) as w:
        asked = [w.ask_for(prompt(1, length), replace(sampling, choice=i))[0] for i in range(N)]
        w.until_ended(*asked)
        return [each.tokens for each in asked]


def ask(w: World, sampling: SamplingParams = SEEDED, length: int = len(PROMPT)) -> list[Asked]:
    return w.ask_for(prompt(1, length), replace(sampling, num_choices=N))


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [100, 96, 1])
def test_choices_equal_single_requests(tiny_model: Path, plane: str, overlap: bool, length: int) -> None:
    right = alone(tiny_model, SEEDED, length)
    assert len({tuple(tokens) for tokens in right}) == N
    with world(tiny_model, plane=plane, overlap=overlap) as w:
        choices = ask(w, SEEDED, length)
        w.until_ended(*choices)
        assert [asked.tokens for asked in choices] == right
        assert (w.counter("tokens_computed"), w.passed((D, P), "Prefill")) == (length, 1)
        w.until(w.is_clean)


@pytest.mark.parametrize(
    "changes",
    [
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
        {"min_tokens": 8, "stop_token_ids": tuple(range(0, 200, 2)), "top_k": 30},
        {"max_tokens": 1},
    ],
    ids=["penalties", "stop tokens", "one token"],
)
def test_each_choice_has_its_own_sampling(tiny_model: Path, changes: dict[str, Any]) -> None:
    sampling = replace(SEEDED, **changes)
    with world(tiny_model, overlap=True) as w:
        choices = ask(w, sampling)
        w.until_ended(*choices)
        assert [asked.tokens for asked in choices] == alone(tiny_model, sampling)
        w.until(w.is_clean)


def test_a_choice_that_ends_with_its_first_token_leaves_the_others_alone(tiny_model: Path) -> None:
    right = alone(tiny_model, SEEDED)
    sampling = replace(
        SEEDED, stop_token_ids=(right[0][0],)
    )  # of the one that has the prompt's own last page
    with world(tiny_model) as w:
        choices = ask(w, sampling)
        w.until_ended(*choices)
        assert choices[0].tokens == right[0][:1]
        assert [asked.tokens for asked in choices] == alone(tiny_model, sampling)
        w.until(w.is_clean)


def test_the_ledger_counts_a_shared_page_once(tiny_model: Path) -> None:
    with world(tiny_model) as w:
        choices = ask(w, replace(SEEDED, max_tokens=100))
        w.until(lambda: all(len(asked.tokens) == 5 for asked in choices))
        assert w.ledgers()[0].active == 7 + N - 1  # the last one is copied for all but one
        w.until(lambda: all(len(asked.tokens) == 20 for asked in choices))
        assert w.ledgers()[0].active == 7 + N - 1 + N
        for asked in choices[:3]:
            w.abort(asked)
        w.until(lambda: w.ledgers()[0].active == 8)
        w.abort(choices[3])
        w.until(w.is_clean, CLEAN_WITHIN_S)


def test_more_than_there_are_rows_is_refused(tiny_model: Path) -> None:
    with world(tiny_model, sizes=Sizes(max_running=1)) as w:
        choices = w.ask_for(PROMPT, replace(SEEDED, num_choices=3))
        w.until_ended(*choices)
        errors = [asked.error for asked in choices]
        assert {(e.status, e.code, e.param) for e in errors if e is not None} == {
            (400, "too_many_choices", "n")
        }
        assert None not in errors
        check_next(tiny_model, w)


# An abort, wherever their prompt is ------------------------------------------------------------------------

Reached = tuple[list[Asked], Callable[[], Any]]  # and what is to happen after the abort
LONG, ONE = replace(SEEDED, max_tokens=200), replace(SEEDED, max_tokens=1)


def held(route: tuple[str, str], kind: str, sampling: SamplingParams = SEEDED) -> Callable[[World], Reached]:
    """One of its messages is on its way."""

    def reach(w: World) -> Reached:
        rule = w.add(Rule(route, kind, Fault.HELD))
        choices = ask(w, sampling)
        w.until(lambda: rule.fired == 1)
        return choices, lambda: w.release(rule)

    return reach


def queued(w: World) -> Reached:
    w.held.add(P)
    w.ask(prompt(2, 70), 8)
    choices = ask(w)
    w.until(lambda: w.phase(choices[0]) is Phase.QUEUED)
    return choices, lambda: w.held.discard(P)


def between_chunks(w: World) -> Reached:
    choices = ask(w)
    w.until(lambda: w.counter("tokens_computed") > 0)
    w.held.add(P)
    w.until(lambda: w.counter("pages_received") > 0)
    assert w.phase(choices[0]) is Phase.TRANSFERRING
    return choices, lambda: w.held.discard(P)


def running(w: World) -> Reached:
    choices = ask(w)
    w.until(lambda: all(len(asked.tokens) >= 3 for asked in choices))
    return choices, lambda: None


def waiting_for_a_place(w: World) -> Reached:
    choices = ask(w)
    w.until(lambda: len(choices[0].tokens) >= 3)
    assert w.phase(choices[3]) is Phase.ARRIVED
    return choices, lambda: None


def retracted(w: World) -> Reached:
    choices = ask(w, LONG)
    w.until(lambda: w.counter("requests_retracted") > 0)
    assert w.phase(choices[3]) is Phase.QUEUED
    return choices, lambda: None


STATES: dict[str, tuple[Callable[[World], Reached], Sizes]] = {
    "not arrived yet": (held((G, D), "Submit"), SIZES),
    "queued": (queued, SIZES),
    "granted": (held((D, P), "Prefill"), SIZES),
    "between chunks": (between_chunks, SIZES),
    "committed": (held((P, D), "Commit"), SIZES),
    "first tokens on their way": (held((D, G), "Tokens", ONE), SIZES),
    "running": (running, SIZES),
    "waiting for a place": (waiting_for_a_place, Sizes(max_running=2)),
    "retracted": (retracted, Sizes(d_pages=30)),
}
ASKED = {"retracted": LONG, "first tokens on their way": ONE}
WHOM: dict[str, Sequence[int]] = {"first": (0,), "third": (2,), "two": (0, 3), "all": range(N)}


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("whom", WHOM)
@pytest.mark.parametrize("state", STATES)
def test_an_abort_ends_those_choices_alone(tiny_model: Path, state: str, whom: str, plane: str) -> None:
    reach, sizes = STATES[state]
    with world(tiny_model, plane=plane, overlap=True, sizes=sizes) as w:
        choices, go_on = reach(w)
        for i in WHOM[whom]:
            w.abort(choices[i])
        w.run(0.05)
        go_on()
        w.until_ended(*choices)
        right = alone(tiny_model, ASKED.get(state, SEEDED))
        for asked, tokens in zip(choices, right, strict=True):
            assert asked.error is None, asked.error
            assert asked.tokens == (tokens[: len(asked.tokens)] if asked.is_aborted else tokens)
        check_next(tiny_model, w)
        assert w.counter("messages_misplaced") == 0


# What P says wrongly, and what is lost ----------------------------------------------------------------------


def with_choices(change: Callable[[Commit], Commit], times: int) -> Callable[[Any], Any]:
    """Change so many Commits."""
    left = [times]

    def edit(message: Any) -> Any:
        if not isinstance(message, Commit) or not left[0]:
            return message
        left[0] -= 1
        return change(message)

    return edit


@pytest.mark.parametrize(
    "change",
    [
        lambda commit: replace(commit, choices=()),
        lambda commit: replace(commit, choices=commit.choices[:-1]),
        lambda commit: replace(commit, choices=commit.choices * 2),
    ],
    ids=["none", "one too few", "twice as many"],
)
def test_another_number_of_choices_fails_the_transfer(
    tiny_model: Path, change: Callable[[Commit], Commit]
) -> None:
    with world(tiny_model, edit=with_choices(change, 1)) as w:  # once: another try, unseen
        choices = ask(w)
        w.until_ended(*choices)
        assert [asked.tokens for asked in choices] == alone(tiny_model, SEEDED)
        assert w.counter("transfers_failed") == 1
        check_next(tiny_model, w)
    with world(tiny_model, edit=with_choices(change, 3)) as w:
        choices = ask(w)
        w.until_ended(*choices)
        assert [asked.error and asked.error.status for asked in choices] == [503] * N
        check_next(tiny_model, w)


def test_a_first_token_that_is_none_fails_all_choices(tiny_model: Path) -> None:
    def change(commit: Commit) -> Commit:
        *good, last = commit.choices
        return replace(commit, choices=(*good, replace(last, first_token=10**6)))

    with world(tiny_model, edit=with_choices(change, 1)) as w:
        choices = ask(w)
        w.until_ended(*choices)
        assert [asked.error and asked.error.status for asked in choices] == [500] * N
        assert not any(asked.tokens for asked in choices)
        check_next(tiny_model, w)


@pytest.mark.parametrize(
    ("route", "kind"), [((G, D), "Submit"), ((D, P), "Prefill"), ((P, D), "Commit"), ((D, G), "Tokens")]
)
@pytest.mark.parametrize("fault", [Fault.LOST, Fault.DOUBLED, Fault.STALLED])
def test_a_message_is_lost_doubled_or_late(
    tiny_model: Path, route: tuple[str, str], kind: str, fault: Fault
) -> None:
    with world(tiny_model, rules=(Rule(route, kind, fault),)) as w:
        choices = ask(w)
        w.until_ended(*choices)
        for asked, tokens in zip(choices, alone(tiny_model, SEEDED), strict=True):
            if fault is Fault.LOST and kind in ("Submit", "Tokens"):
                assert asked.error is not None
                assert asked.error.status == 500
            else:
                assert asked.tokens == tokens
        check_next(tiny_model, w)
