"""The tables of a transfer: every state can be reached, ends are ends, and an end is always near."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from transfer.states import (
    RECEIVER_ENDS,
    RECEIVER_TABLE,
    SENDER_ENDS,
    SENDER_TABLE,
    ReceiverEvent,
    ReceiverState,
    SenderEvent,
    SenderState,
)

R, RE, S, SE = ReceiverState, ReceiverEvent, SenderState, SenderEvent


def reachable(start: object, steps: Callable[[object], set[object]]) -> set[object]:
    seen, to_do = {start}, [start]
    while to_do:
        for after in steps(to_do.pop()) - seen:
            seen.add(after)
            to_do.append(after)
    return seen


@pytest.mark.parametrize(
    ("table", "states", "start", "ends"),
    [(RECEIVER_TABLE, R, R.GRANTED, RECEIVER_ENDS), (SENDER_TABLE, S, S.QUEUED, SENDER_ENDS)],
    ids=["receiver", "sender"],
)
def test_every_state_is_reached_and_an_end_is_an_end(
    table: dict[tuple[object, object], object], states: type, start: object, ends: frozenset[object]
) -> None:
    def steps(state: object) -> set[object]:
        return {after for (before, _), after in table.items() if before is state}

    assert reachable(start, steps) == set(states)  # type: ignore[call-overload]
    for state in states:  # type: ignore[attr-defined]
        assert (steps(state) == set()) == (state in ends)
        assert reachable(state, steps) & ends


def test_a_broken_link_ends_every_transfer_of_d_at_once() -> None:
    for state in set(R) - RECEIVER_ENDS:
        assert RECEIVER_TABLE[state, RE.LOST] in RECEIVER_ENDS


def test_p_can_be_told_to_stop_wherever_it_is() -> None:
    for state in set(S) - SENDER_ENDS:
        for event in (SE.ABORT, SE.LOST, SE.FAIL):
            assert SENDER_TABLE[state, event] in {S.QUIESCING, S.CLOSED}
