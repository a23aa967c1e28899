"""Clients that all leave at random moments, and those after them that stay."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from tests.system.client import Client
from tests.system.oracle import Case
from tests.system.test_disconnects import Cut, Visit, leave_early

NUM_AFTERWARDS = 50
NUM_TOKENS = 64


def cancels(cases: Sequence[Case], count: int, seed: int) -> list[Visit]:
    """Requests of which each is left: in its body, before, between or after its tokens."""
    draw = random.Random(seed)
    visits = []
    for _ in range(count):
        # Mostly in the middle of the answer: after some of its about a hundred pieces.
        cut = draw.choice((*Cut, Cut.AFTER_EVENTS, Cut.AFTER_EVENTS))
        stream = cut is not Cut.WHILE_WAITING
        visit = Visit(draw.choice(cases), NUM_TOKENS, stream, cut, draw.randint(1, 90))
        visits.append(replace(visit, reset=draw.random() < 0.5))
    return visits


def leave_all(client: Client, visits: Sequence[Visit], num_streams: int) -> None:
    """Have so many clients come and leave at a time."""
    left = iter(visits)

    async def one() -> None:
        async with client.session() as http:
            for visit in left:
                await leave_early(client, http, visit)

    async def run() -> None:
        await asyncio.gather(*(one() for _ in range(num_streams)))

    asyncio.run(run())


def assert_next_are_right(
    client: Client, cases: Sequence[Case], seed: int, at_once: int = NUM_AFTERWARDS
) -> None:
    """Send fifty requests of many lengths, so many at once, and check that each is right."""
    draw = random.Random(seed)
    chosen = [(draw.choice(cases), draw.choice((1, 2, 9, 33, NUM_TOKENS))) for _ in range(NUM_AFTERWARDS)]
    for first in range(0, NUM_AFTERWARDS, at_once):
        batch = chosen[first : first + at_once]
        outcomes = client.ask_all([case.body(most) for case, most in batch])
        for (case, most), outcome in zip(batch, outcomes, strict=True):
            case.check(outcome, most)
