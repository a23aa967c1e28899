"""Whole pairs of machines over a lossy wire: the models of tests/wire, moved by bytes instead of hypothesis.

A byte chooses what happens next, the bytes behind it how. In the end the wire heals, and everything must
end; the models check it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

from hypothesis.stateful import INVARIANT_MARKER, RULE_MARKER, RuleBasedStateMachine

from common.link import LinkState
from fuzz.mutation import changed_bytes
from fuzz.reading import Choices
from tests.wire.test_link_lossy import LinksOverALossyWire
from tests.wire.test_transfer_lossy import OneSidedTransfers, TransfersOverALossyLink

MAX_BYTES = 400
MAX_MOVES = 100

# What a rule's argument is drawn from, by its name; the same as in the models.
_ARGUMENTS: dict[str, Callable[[Choices], Any]] = {
    "at": Choices.byte,
    "keep": lambda choices: bool(choices.below(2)),
    "lost": lambda choices: (None, 0, 1, 2, 3, 4, 5, 6)[choices.below(8)],
    "num_pages": lambda choices: 1 + choices.below(4),
    "reject": lambda choices: bool(choices.below(2)),
    "seconds": lambda choices: (0.3, 1.0, 0.1, 3.0)[choices.below(4)],
    "side": lambda choices: choices.below(2),
    "times": lambda choices: 1 + choices.below(2),
    "to_d": lambda choices: bool(choices.below(2)),
}

Move = tuple[str, tuple[str, ...], tuple[Callable[[Any], bool], ...]]  # name, arguments, preconditions


@cache
def _moves(kind: type[RuleBasedStateMachine]) -> tuple[tuple[Move, ...], tuple[str, ...]]:
    """Return the rules of a model, and the names of its invariants."""
    moves: list[Move] = []
    invariants: list[str] = []
    for name in sorted(dir(kind)):
        member = getattr(kind, name)
        if (rule := getattr(member, RULE_MARKER, None)) is not None:
            moves.append((name, tuple(rule.arguments_strategies), rule.preconditions))
        if getattr(member, INVARIANT_MARKER, None) is not None:
            invariants.append(name)
    return tuple(moves), tuple(invariants)


def play(kind: type[RuleBasedStateMachine], data: bytes) -> Any:
    """Move a model as the bytes say, check it after each move, and let it end; return it."""
    moves, invariants = _moves(kind)
    choices = Choices(data)
    world: Any = kind()
    if hasattr(world, "begin"):
        world.begin()
    for _ in range(MAX_MOVES):
        if not choices.left:
            break
        name, arguments, preconditions = choices.one_of(moves)
        drawn = {argument: _ARGUMENTS[argument](choices) for argument in arguments}
        if all(precondition(world) for precondition in preconditions):
            getattr(world, name)(**drawn)
            for invariant in invariants:
                getattr(world, invariant)()
    return world


def _transfers(kind: type[TransfersOverALossyLink]) -> Callable[[bytes], str]:
    def run(data: bytes) -> str:
        world = play(kind, data)
        before = {outgoing.machine.state.name for outgoing in world.p.all}
        world.teardown()
        outcomes = {incoming.outcomes[0] for incoming in world.d.all.values()}
        ends = {incoming.machine.state.name for incoming in world.d.all.values()}
        return f"{sorted(before)} {sorted(outcomes)} {sorted(ends)} {world.process > 1}"

    return run


def _links(data: bytes) -> str:
    world = play(LinksOverALossyWire, data)
    before = [end.link.state for end in world.ends]
    assert set(before) <= set(LinkState)
    delivered = [min(2, len(end.inbox)) for end in world.ends]
    world.teardown()
    return f"{[state.name for state in before]} {delivered} {min(4, world.next_epoch)}"


RUNS: dict[str, Callable[[bytes], str]] = {
    "link-pair": _links,
    "transfer-pair": _transfers(TransfersOverALossyLink),
    "one-sided-pair": _transfers(OneSidedTransfers),
}


def seeds() -> list[bytes]:
    """Some runs of many moves."""
    draw = random.Random(7)
    return [b"", *(draw.randbytes(size) for size in (20, 60, 120, 240))]


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Change, add or leave out some moves."""
    return draw.randbytes(draw.randint(1, 200)) if draw.random() < 0.05 else changed_bytes(data, draw)
