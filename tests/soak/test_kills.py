"""A hundred nodes are killed, a prefill and a decode node in turn, while clients go on asking."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.faults.cancels import assert_next_are_right
from tests.soak.settings import setting
from tests.system.client import Client, Outcome
from tests.system.load import Fate
from tests.system.oracle import Case
from tests.system.server import START_S, Server, poll_until, running

pytestmark = pytest.mark.soak

NUM_KILLS = setting("KILLS", 100)
NUM_CLIENTS = 16
LEAST_PAUSE_S = 1.0  # between two kills
LAST_ONE_EVERY = 10  # kills: then also where it may be the last of its kind, so that nobody can be served
ANSWERED_S = 10.0  # promised: whoever was there at a death has an answer or an error within so long
CLEAN_S = 5.0
STALL_TIMEOUT_S = 4
MAX_TOKENS = (1, 2, 9, 33, 64)
VICTIMS = ("prefill-0", "decode-0", "prefill-1", "decode-1")


@dataclass
class Asked(Fate):
    """A request with its times."""

    start_s: float = 0.0
    end_s: float = 0.0


@dataclass
class Siege:
    """Clients that ask until the last node was killed, and who kills."""

    server: Server
    cases: Sequence[Case]
    draw: random.Random = field(default_factory=lambda: random.Random(41))
    asked: list[Asked] = field(default_factory=list)
    kills_s: list[float] = field(default_factory=list)
    is_over: bool = False

    async def ask(self, client: Client, http: httpx.AsyncClient) -> None:
        """Ask again and again, half of it streamed; who was refused comes back when the server is ready."""
        while not self.is_over:
            asked = Asked(self.draw.choice(self.cases), Outcome(), max_tokens=self.draw.choice(MAX_TOKENS))
            self.asked.append(asked)
            body = asked.case.body(asked.max_tokens, stream=self.draw.random() < 0.5)
            asked.start_s = time.monotonic()
            await client.follow(http, body, asked.outcome)
            asked.end_s = time.monotonic()
            while not asked.outcome.succeeded and (await http.get("/ready")).status_code != 200:
                await asyncio.sleep(0.05)

    async def kill(self, http: httpx.AsyncClient) -> None:
        """Kill one after the other, each when it works and mostly when the other of its kind does."""
        for i in range(NUM_KILLS):
            await asyncio.sleep(LEAST_PAUSE_S)
            victim, twin = VICTIMS[i % len(VICTIMS)], VICTIMS[(i + 2) % len(VICTIMS)]
            must_work = {victim} if i % LAST_ONE_EVERY == LAST_ONE_EVERY - 1 else {victim, twin}
            end = time.monotonic() + START_S
            while not must_work <= await self._working(http):
                assert time.monotonic() < end, f"{must_work} do not come back"
                await asyncio.sleep(0.05)
            os.kill(self.server.nodes()[victim], signal.SIGKILL)
            self.kills_s.append(time.monotonic())
        self.is_over = True

    async def _working(self, http: httpx.AsyncClient) -> set[str]:
        """Nodes that answer the gateway, and are not about to be found dead."""
        there = {node["id"] for node in (await http.get("/debug/kv")).json()["nodes"]}
        return there & self.server.nodes().keys()

    async def run(self, client: Client) -> None:
        """Have all of them at work until the last kill."""
        async with client.session() as http, asyncio.TaskGroup() as group:
            group.create_task(self.kill(http))
            for _ in range(NUM_CLIENTS):
                group.create_task(self.ask(client, http))

    def longest_wait_s(self) -> float:
        """The longest time from a death to the end of a request that was there when it happened."""
        return max(
            (
                asked.end_s - kill_s
                for asked in self.asked
                for kill_s in self.kills_s
                if asked.start_s < kill_s < asked.end_s
            ),
            default=0.0,
        )


def test_kills_in_turn(model: Path, cases: list[Case], say: Callable[[str], None]) -> None:
    args = ("--prefill", "2", "--decode", "2", "--stall-timeout", str(STALL_TIMEOUT_S))
    with running(model, *args, calm=False) as server:
        client = Client(server.url, server.model)
        siege = Siege(server, cases)
        start = time.monotonic()
        asyncio.run(siege.run(client))
        took_s = time.monotonic() - start
        heard = Counter(
            "right" if asked.outcome.succeeded else f"error {asked.outcome.status}" for asked in siege.asked
        )
        say(
            f"{NUM_KILLS} kills in {took_s:.0f} s: {len(siege.asked)} requests, {dict(heard)}; "
            f"from a death to the end of a request {siege.longest_wait_s():.2f} s at most"
        )
        assert [asked for asked in siege.asked if not asked.heard] == []  # right, or an error; never wrong
        assert {asked.outcome.status for asked in siege.asked} <= {200, 500, 503}
        assert heard["right"] > len(siege.asked) / 2
        assert siege.longest_wait_s() < ANSWERED_S

        poll_until(lambda: set(server.nodes()) == set(VICTIMS), START_S, "all nodes are back")
        poll_until(
            lambda: client.ledger_trouble() is None, START_S, "all have joined", client_trouble(client)
        )
        server.wait_ready()
        client.assert_ledger_clean(CLEAN_S)
        assert_next_are_right(client, cases, seed=42)
        client.assert_ledger_clean()
        restarts = sum(client.metric("baton_restarts_total", role=role) for role in ("prefill", "decode"))
        assert restarts == NUM_KILLS  # nobody died but by our hand
        assert client.metric("baton_restarts_total", role="gateway") == 0
        assert "Traceback" not in server.process.log()


def client_trouble(client: Client) -> Callable[[], str]:
    """What is wrong with the ledgers, for a message."""
    return lambda: str(client.ledger_trouble())
