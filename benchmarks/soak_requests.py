"""The requests of the soak, each with the answer that a loop over the logits of transformers gives for it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.system.client import Body, Client
from tests.system.oracle import Case as GreedyCase
from tests.system.test_disconnects import Cut, Visit, leave_early
from tests.system.test_logprobs_penalties import DEFAULTS, FIELDS, Case, Loop, Scored, check
from tests.tiny import VOCAB_SIZE

_LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65, 128, 200, 300)
_MAX_TOKENS = (1, 2, 9, 20, 40, 64)
_LEAVE_SHARE, _HURRY_SHARE, _STREAM_SHARE = 0.15, 0.1, 0.5
# Busy, no node to be had, or a deadline; 200: the error came behind the first token. 500 is for tokens that
# were lost on the way, which fault points alone do.
_ALLOWED = (200, 429, 503, 504)
LOST = 500
REQUEST_TIMEOUT_S = 30  # the server's own deadline: some faults are found by nothing else


def make_cases(loop: Loop, count: int, seed: int) -> list[Case]:
    """Requests of many kinds (greedy, sampled, penalised, with log probabilities) and their answers."""
    draw = random.Random(seed)
    bodies = [DEFAULTS | fields for fields in FIELDS]
    while len(bodies) < count:
        bodies.append(DEFAULTS | _random_fields(draw))
    return [loop.case(body, body["prompt"]) for body in bodies]


def _random_fields(draw: random.Random) -> Body:
    length = draw.choice(_LENGTHS)
    fields: Body = {
        "prompt": [draw.randrange(3, VOCAB_SIZE) for _ in range(length)],
        "max_tokens": draw.choice(_MAX_TOKENS),
    }
    if draw.random() < 0.4:
        fields |= {"temperature": draw.choice((0.7, 1.0, 1.5)), "seed": draw.randrange(1 << 40)}
        if draw.random() < 0.5:
            fields["top_k"] = draw.randint(2, 50)
    if draw.random() < 0.4:
        fields["presence_penalty"] = draw.choice((-0.5, 0.5, 1.5))
        fields["frequency_penalty"] = draw.choice((0.0, 0.7, 2.0))
    if draw.random() < 0.2:
        fields["repetition_penalty"] = draw.choice((0.9, 1.2))
    if draw.random() < 0.3:
        fields["logprobs"] = draw.choice((0, 1, 5))
    return fields


@dataclass
class Tally:
    """How the requests ended."""

    allowed: tuple[int, ...] = _ALLOWED
    ends: Counter[str] = field(default_factory=Counter)
    by_second: Counter[tuple[int, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    start_s: float = field(default_factory=time.monotonic)

    def count(self, end: str) -> None:
        """Count one."""
        self.ends[end] += 1
        self.by_second[int(time.monotonic() - self.start_s), end] += 1

    def judge(self, case: Case, outcome: Scored, loop: Loop, *, timeout_s: float, took_s: float) -> None:
        """Count a request that its client waited for: right, an error that is allowed, or wrong."""
        self.slowest_s = max(self.slowest_s, took_s)
        if outcome.succeeded:
            try:
                check(case, outcome, loop)
            except AssertionError as why:
                self._is_wrong(case, outcome, str(why)[:500])
            else:
                self.count("right")
            return
        error = outcome.error
        if error is None or outcome.status not in self.allowed or (outcome.done and outcome.status == 200):
            self._is_wrong(case, outcome, "neither an answer nor an error that is allowed")
        elif error["code"] == "deadline_exceeded" and took_s < timeout_s:
            self._is_wrong(case, outcome, f"too late after {took_s:.2f} s, with a deadline of {timeout_s} s")
        elif outcome.status == 200:
            self.count(f"in a stream {error['code'] or error['type']}")
        else:
            self.count(f"{outcome.status}")

    def _is_wrong(self, case: Case, outcome: Scored, why: str) -> None:
        self.count("wrong")
        self.wrong.append(f"{why}\n  {case.body}\n  {case.tokens}\n  {outcome}")


@dataclass
class Crowd:
    """Clients that ask until they are told to stop."""

    client: Client
    cases: Sequence[Case]
    loop: Loop
    draw: random.Random
    tally: Tally = field(default_factory=Tally)
    is_over: bool = False

    async def ask(self, http: httpx.AsyncClient) -> None:
        """Ask again and again; who was refused comes back a little later."""
        while not self.is_over:
            if not await self.one(http):
                await asyncio.sleep(self.draw.uniform(0.05, 0.5))

    async def one(self, http: httpx.AsyncClient) -> bool:
        """Ask once, and leave early, or be in a hurry, or wait; say whether all went well."""
        case = self.draw.choice(self.cases)
        if self.draw.random() < _LEAVE_SHARE:
            return await self._leave(http, case)
        fields: dict[str, Any] = {}
        if self.draw.random() < _STREAM_SHARE:
            fields = {"stream": True, "stream_options": {"include_usage": True}}
        timeout_s = float(REQUEST_TIMEOUT_S)
        if self.draw.random() < _HURRY_SHARE:
            fields["timeout"] = timeout_s = self.draw.choice((0.05, 0.2, 1.0))
        outcome = Scored()
        start_s = time.monotonic()
        await self.client.follow(http, case.body | fields, outcome)
        took_s = time.monotonic() - start_s
        self.tally.judge(case, outcome, self.loop, timeout_s=timeout_s, took_s=took_s)
        return outcome.succeeded

    async def burst(self, http: httpx.AsyncClient, count: int) -> None:
        """Send so many at once."""
        await asyncio.gather(*(self.one(http) for _ in range(count)))

    async def _leave(self, http: httpx.AsyncClient, case: Case) -> bool:
        cut = self.draw.choice((Cut.IN_THE_BODY, Cut.BEFORE_READING, Cut.AFTER_EVENTS, Cut.AFTER_EVENTS))
        greedy = GreedyCase(case.body["prompt"], [])
        visit = Visit(greedy, 64, True, cut, self.draw.randint(1, 60), reset=self.draw.random() < 0.5)
        try:
            await leave_early(self.client, http, visit)
        except ConnectionError:
            self.tally.count("client left first")
            return False
        self.tally.count("client left")
        return True
