"""A load that goes on while something happens to the server: how every client fared, and how long after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

from tests.system.client import WAIT_S, Client, Outcome
from tests.system.oracle import Case


@dataclass
class Fate:
    """What came of one request."""

    case: Case
    outcome: Outcome
    had_tokens: bool = False  # when it happened
    ended_s: float = 0.0  # seconds after it happened; 0 before
    max_tokens: int | None = None  # None: the whole answer of the case
    took_s: float = 0.0

    @property
    def heard(self) -> bool:
        """The client got a right answer, or an error object; never half an answer that looks whole."""
        if self.outcome.succeeded:
            self.case.check(self.outcome, self.max_tokens)
            return True
        return self.outcome.error is not None and (not self.outcome.done or self.outcome.status >= 400)


def load(client: Client, cases: Sequence[Case], event: Callable[[], object]) -> list[Fate]:
    """Send all at once, half of them streamed; do `event` when some have tokens, and others none."""
    fates = [Fate(case, Outcome()) for case in cases]
    happened: list[float] = []

    async def one(http: httpx.AsyncClient, fate: Fate, *, stream: bool) -> None:
        await client.follow(http, fate.case.body(stream=stream), fate.outcome)
        fate.ended_s = time.monotonic() - happened[0] if happened else 0.0

    async def run() -> None:
        async with client.session() as http:
            tasks = [asyncio.create_task(one(http, fate, stream=i % 2 == 0)) for i, fate in enumerate(fates)]
            end = time.monotonic() + WAIT_S
            while sum(bool(fate.outcome.token_ids) for fate in fates) * 6 < len(fates):
                assert time.monotonic() < end, "no tokens come"
                await asyncio.sleep(0.001)
            for fate in fates:
                fate.had_tokens = bool(fate.outcome.token_ids)
            event()
            happened.append(time.monotonic())
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert any(fate.ended_s == 0 or not fate.had_tokens for fate in fates)
    return fates


async def _ready(http: httpx.AsyncClient) -> None:
    """Come back when the server takes requests again, as a client does that was told to."""
    end = time.monotonic() + WAIT_S
    while (await http.get("/ready")).status_code != 200:
        assert time.monotonic() < end, "not ready again"
        await asyncio.sleep(0.05)


def steady_load(
    client: Client,
    fates: Sequence[Fate],
    num_clients: int,
    between: Callable[[httpx.AsyncClient], Awaitable[object]],
) -> None:
    """Have so many clients send the requests one after the other, half of them streamed.

    `between` is called when a request has ended, never twice at a time. A client whose request failed sends
    its next one when the server is ready: otherwise all would be spent while nobody is there.
    """
    left = iter(enumerate(fates))
    is_between = asyncio.Lock()

    async def one(http: httpx.AsyncClient) -> None:
        for i, fate in left:
            start = time.monotonic()
            await client.follow(http, fate.case.body(fate.max_tokens, stream=i % 2 == 0), fate.outcome)
            fate.took_s = time.monotonic() - start
            if not is_between.locked():
                async with is_between:
                    await between(http)
            if not fate.outcome.succeeded:
                await _ready(http)

    async def run() -> None:
        async with client.session() as http:
            await asyncio.gather(*(one(http) for _ in range(num_clients)))

    asyncio.run(run())
