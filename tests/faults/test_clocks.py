"""Stamps of a request on the gateway's clock, from nodes whose clocks are far from it and from each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common.messages import Begun, Commit, Granted, Status, Tokens
from common.request import MAX_CHUNK_STAMPS, MOST_S, PrefillStamps, SamplingParams
from gateway.nodes import NodeStamps
from tests.faults.world import TURN_S, D, G, P, World, world
from tests.faults.world_asked import Asked
from tests.faults.world_cases import check_answer, check_next, prompt
from tests.faults.world_line import Fault, Rule

PROMPT = prompt(1, 100)  # four chunks of P's
# A Status takes a turn or two of the world either way: so much a clock may be wrong by, and so two of them.
NEAR_S = 10 * TURN_S


def in_order(stamps: NodeStamps) -> list[float]:
    """All of a request that was handed over and decoded."""
    told = [
        stamps.queued_s,
        stamps.granted_s,
        stamps.prefill_start_s,
        *stamps.chunks_s,
        stamps.committed_s,
        stamps.arrived_s,
        stamps.prebuilt_s,
        stamps.second_token_s,
    ]
    return [at_s for at_s in told if at_s is not None]


def check_stamps(w: World, asked: Asked, asked_s: float) -> None:
    """They are in order, and between the asking and the end."""
    stamps = asked.stream.stamps
    assert (stamps.decode_node, stamps.prefill_node) == ("decode-0", "prefill-0")
    told = in_order(stamps)
    assert len(told) == 7 + 4
    story = [asked_s, *told, w.now]
    assert all(later >= earlier - NEAR_S for earlier, later in pairwise(story)), story


@pytest.mark.parametrize(
    "ahead_s", [{}, {P: 1000.0}, {D: -500.0}, {D: 1000.0, P: -300.0}], ids=["none", "p", "d", "both"]
)
def test_stamps_are_on_the_gateways_clock(tiny_model: Path, ahead_s: Mapping[str, float]) -> None:
    with world(tiny_model, ahead_s=ahead_s) as w:
        w.two_statuses()
        asked_s = w.now
        asked = w.ask(PROMPT, 4)
        w.until_ended(asked)
        check_answer(tiny_model, asked)
        check_stamps(w, asked, asked_s)


def test_a_request_before_the_second_status_has_them_too(tiny_model: Path) -> None:
    with world(tiny_model, ahead_s={D: 1000.0, P: -300.0}) as w:
        asked_s = w.now
        asked = w.ask(PROMPT, 4)
        w.until_ended(asked)
        check_stamps(w, asked, asked_s)


def test_a_lost_status_changes_nothing(tiny_model: Path) -> None:
    rules = [Rule(route, "Status", Fault.LOST, nth) for route in ((P, D), (D, P), (D, G)) for nth in (2, 3)]
    with world(tiny_model, ahead_s={D: 1000.0, P: -300.0}, rules=rules) as w:
        w.until(lambda: all(rule.fired for rule in rules))
        w.two_statuses()
        asked_s = w.now
        asked = w.ask(PROMPT, 4)
        w.until_ended(asked)
        check_stamps(w, asked, asked_s)


def test_stamps_are_known_while_a_request_goes_on(tiny_model: Path) -> None:
    with world(tiny_model) as w:
        w.held.add(P)
        asked = w.ask(PROMPT, 4)
        assert asked.stream.stamps == NodeStamps("decode-0")
        w.until(lambda: asked.stream.stamps.granted_s is not None)
        granted = asked.stream.stamps
        assert (granted.prefill_node, granted.chunks_s, granted.arrived_s) == ("prefill-0", (), None)
        w.held.discard(P)
        w.until(lambda: bool(asked.tokens))
        begun = asked.stream.stamps
        assert (len(begun.chunks_s), begun.prebuilt_s) == (4, None)
        assert (begun.queued_s, begun.granted_s) == (granted.queued_s, granted.granted_s)
        w.until_ended(asked)
        assert asked.stream.stamps.second_token_s is not None


def test_a_grant_that_nobody_heard_of_is_told_with_the_first_token(tiny_model: Path) -> None:
    rule = Rule((D, G), "Granted", Fault.LOST)
    with world(tiny_model, rules=[rule]) as w:
        asked_s = w.now
        asked = w.ask(PROMPT, 4)
        w.until_ended(asked)
        assert rule.fired
        check_stamps(w, asked, asked_s)


def test_each_choice_has_the_stamps_of_its_prompt(tiny_model: Path) -> None:
    with world(tiny_model, ahead_s={P: 1000.0}) as w:
        w.two_statuses()
        asked_s = w.now
        sampling = SamplingParams(4, temperature=1.0, seed=1, ignore_eos=True, num_choices=3)
        choices = w.ask_for(PROMPT, sampling)
        w.until_ended(*choices)
        for asked in choices:
            check_stamps(w, asked, asked_s)
        assert len({asked.stream.stamps.arrived_s for asked in choices}) == 1


# Nonsense ---------------------------------------------------------------------------------------------------

NONSENSE = (
    PrefillStamps(MOST_S, (-MOST_S, MOST_S), -MOST_S),
    PrefillStamps(-5.0, (), None),
    PrefillStamps(0.0, tuple(float(-i) for i in range(MAX_CHUNK_STAMPS)), 1e-300),
)


@pytest.mark.parametrize("nonsense", NONSENSE, ids=["huge", "none", "backwards"])
@pytest.mark.parametrize("clock_s", [0.0, MOST_S, -MOST_S])
def test_what_p_says_of_times_spoils_times_and_nothing_else(
    tiny_model: Path, nonsense: PrefillStamps, clock_s: float
) -> None:
    def edit(message: Any) -> Any:
        if isinstance(message, Commit):
            return replace(message, stamps=nonsense)
        if isinstance(message, Status):
            return replace(message, sent_s=clock_s, echo_s=-clock_s, echo_came_s=clock_s)
        return message

    with world(tiny_model, ahead_s={P: 1000.0}, edit=edit) as w:
        w.two_statuses()
        asked = w.ask(PROMPT, 4)
        w.until_ended(asked)
        check_answer(tiny_model, asked)
        assert len(asked.stream.stamps.chunks_s) == len(nonsense.chunks_s)
        assert asked.stream.stamps.arrived_s is not None  # D's own
        assert w.now - 1.0 < asked.stream.stamps.arrived_s <= w.now
        assert w.counter("messages_rejected") == w.client.counters()["messages_rejected"] == 0
        check_next(tiny_model, w)


def test_a_decode_node_that_names_what_nobody_asked_for_is_passed_over(tiny_model: Path) -> None:
    stranger = Granted((1, 2, 10**9), "nobody", queued_s=-1.0, granted_s=-2.0)

    def edit(message: Any) -> Any:
        if isinstance(message, Tokens):
            return replace(
                message,
                begun=(*message.begun, Begun(replace(stranger, request_ids=(10**9,)), NONSENSE[0], 0.0)),
            )
        return stranger if isinstance(message, Granted) else message

    with world(tiny_model) as w:
        w.lines[0].edit = edit
        asked = w.ask(PROMPT, 4)
        w.until_ended(asked)
        check_answer(tiny_model, asked)
        assert asked.stream.stamps.prefill_node == "prefill-0"
