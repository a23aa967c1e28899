"""Every kind of message on every link, one lost, doubled or late: the request ends, and all is clean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from common.messages import MESSAGES, Failed, HelloAck, Rejected
from tests.faults.world import ROUTES, D, G, P, World, world
from tests.faults.world_asked import Asked
from tests.faults.world_cases import check_answer, check_next, prompt
from tests.faults.world_engines import Sizes
from tests.faults.world_line import Fault, Route, Rule
from tests.faults.world_states import between_chunks_of

PROMPT, NUM_TOKENS = prompt(1, 100), 8  # four chunks of P's, seven pages
SMALL = 3  # pages: not enough for it, enough for the next request
FAULTS = (Fault.LOST, Fault.DOUBLED, Fault.STALLED, Fault.OVERTAKEN)
HARMLESS = (Fault.DOUBLED, Fault.STALLED)  # nobody must notice


# What travels -----------------------------------------------------------------------------------------------


def hand_over(w: World) -> Asked:
    """A request from beginning to end."""
    return w.ask(PROMPT, NUM_TOKENS)


def with_stats(w: World) -> Asked:
    """Somebody reads /debug/kv meanwhile: each node answers, or is named as one that does not."""
    asked = w.ask(PROMPT, NUM_TOKENS)
    query = w.start(w.client.snapshot())
    w.until(query.done, 3.0)
    answers, missing = query.result()
    assert sorted([*(node.node_id for node in answers), *missing]) == ["decode-0", "prefill-0"]
    return asked


def scored(w: World) -> Asked:
    """The same, with the log probabilities of its prompt."""
    return w.ask(PROMPT, NUM_TOKENS, num_prompt_logprobs=2)


def aborted(w: World) -> Asked:
    """The client leaves while P computes."""
    asked = w.ask(PROMPT, NUM_TOKENS)
    between_chunks_of(w, asked)
    w.abort(asked)
    rules = [rule for line in w.lines for rule in line.rules]
    w.until(lambda: w.passed((D, P), "Abort") > 0 or any(rule.fired for rule in rules))
    w.held.discard(P)  # where the Abort was lost, P computes on
    return asked


def refused(w: World) -> Asked:
    """D does not take it."""
    return w.ask(PROMPT, 10_000)


@dataclass(frozen=True)
class Scenario:
    """What happens, and in which world."""

    ask: Callable[[World], Asked]
    answered: bool = True  # with tokens; otherwise with an error, or not at all
    p_pages: int = 64
    edit: Callable[[object], object] = lambda message: message


def claim_more(message: object) -> object:
    """P says that it holds more than it does: D grants what P then refuses."""
    if isinstance(message, HelloAck):
        return replace(message, hello=replace(message.hello, capacity_tokens=4096))
    return message


def fail(message: object) -> object:
    """P fails where it would refuse. (It does not by itself: there is nothing yet that fails on a CPU.)"""
    if isinstance(message, Rejected):
        return Failed(message.transfer_id, 503, "out of order")
    return claim_more(message)


HAND_OVER = Scenario(hand_over)
SCORED = Scenario(scored)
STATS = Scenario(with_stats)
ABORTED = Scenario(aborted, answered=False)
REFUSED = Scenario(refused, answered=False)
REJECTED = Scenario(hand_over, answered=False, p_pages=SMALL, edit=claim_more)
FAILED = Scenario(hand_over, answered=False, p_pages=SMALL, edit=fail)


@dataclass(frozen=True)
class Row:
    """A message: the nth of its kind on a route."""

    kind: str
    route: Route
    scenario: Scenario = HAND_OVER
    nth: int = 1
    heals: bool = True  # though it is lost, the client gets what it would have got

    def __str__(self) -> str:
        """Name the row."""
        return f"{self.route[0]}>{self.route[1]}-{self.kind}-{self.nth}"


NODES_AND_GATEWAY = [
    *(Row("Hello", (node, G)) for node in (D, P)),
    *(Row("HelloAck", (G, node)) for node in (D, P)),
    *(Row("Status", route, nth=nth) for route in ROUTES[:4] for nth in (1, 2)),
    *(Row("StatsRequest", (G, node), STATS) for node in (D, P)),
    *(Row("Stats", (node, G), STATS) for node in (D, P)),
    *(Row("Peers", (G, D), nth=nth) for nth in (1, 2)),
    Row("Submit", (G, D), heals=False),
    Row("Granted", (D, G)),
    Row("PromptLogprobs", (D, G), SCORED, heals=False),
    *(Row("Tokens", (D, G), nth=nth, heals=False) for nth in (1, 4, NUM_TOKENS)),
    Row("Abort", (G, D), ABORTED),
    Row("Refused", (D, G), REFUSED),
    Row("Failed", (D, G), REJECTED),
]
D_AND_P = [
    Row("Hello", (D, P)),
    Row("HelloAck", (P, D)),
    *(Row("Status", route, nth=nth) for route in ROUTES[4:] for nth in (1, 2)),
    Row("Prefill", (D, P)),
    *(Row("Chunk", (P, D), nth=nth) for nth in (1, 2, 4)),
    Row("Commit", (P, D)),
    Row("Commit", (P, D), SCORED),
    Row("Abort", (D, P), ABORTED),
    Row("Quiesced", (P, D), ABORTED),
    Row("Rejected", (P, D), REJECTED),
    Row("Failed", (P, D), FAILED),
]
ROWS = [
    *(("frames", row) for row in [*NODES_AND_GATEWAY, *D_AND_P, Row("Credit", (D, P))]),
    *(("shm", row) for row in D_AND_P),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize(("plane", "row"), ROWS, ids=str)
def test_a_fault_of_one_message_ends_well(tiny_model: Path, plane: str, row: Row, fault: Fault) -> None:
    rule = Rule(row.route, row.kind, fault, row.nth)
    scenario = row.scenario
    sizes = Sizes(p_pages=scenario.p_pages)
    with world(tiny_model, plane=plane, sizes=sizes, rules=[rule], edit=scenario.edit) as w:
        asked = scenario.ask(w)
        w.until_ended(asked)
        w.until(lambda: rule.fired == 1)
        w.two_statuses()
        assert w.is_clean(), w.describe()
        if scenario.answered and (row.heals or fault in HARMLESS):
            check_answer(tiny_model, asked)
        elif asked.error is None and not asked.is_aborted:
            assert scenario.answered
            check_answer(tiny_model, asked)
        if scenario is SCORED and asked.finish is not None:
            assert asked.prompt_logprobs is not None
            assert len(asked.prompt_logprobs) == len(PROMPT) - 1
        check_next(tiny_model, w)


def test_no_kind_is_left_out() -> None:
    assert {row.kind for _, row in ROWS} == {kind.__name__ for kind in MESSAGES}
