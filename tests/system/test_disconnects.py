"""Clients that leave at any moment cost nobody else anything: 300 requests, a third of them cut."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import httpx
import pytest

from tests.system.client import Body, Client, Outcome
from tests.system.oracle import Case

pytestmark = pytest.mark.system

NUM_REQUESTS = 300
AT_ONCE = 60


class Cut(Enum):
    """When a client leaves."""

    IN_THE_BODY = auto()  # half a request
    BEFORE_READING = auto()  # the request is out
    AFTER_EVENTS = auto()  # some bytes of the answer have come
    WHILE_WAITING = auto()  # a whole answer is waited for, not streamed


@dataclass(frozen=True)
class Visit:
    """A request, and how its client leaves before the end, if it does."""

    case: Case
    max_tokens: int
    stream: bool
    cut: Cut | None = None
    after_reads: int = 0
    reset: bool = False  # by RST, else by FIN

    def body(self) -> Body:
        return self.case.body(self.max_tokens, stream=self.stream)


def plan(cases: Sequence[Case], draw: random.Random, count: int, *, cuts: bool) -> list[Visit]:
    visits = []
    for i in range(count):
        cut = draw.choice(tuple(Cut)) if cuts and i % 3 == 0 else None
        visits.append(
            Visit(
                draw.choice(cases),
                draw.randint(1, 64) if cut is None else 64,
                stream=draw.random() < 0.5 if cut is None else cut is not Cut.WHILE_WAITING,
                cut=cut,
                after_reads=draw.randint(1, 20),
                reset=draw.random() < 0.5,
            )
        )
    draw.shuffle(visits)
    return visits


async def leave_early(client: Client, http: httpx.AsyncClient, visit: Visit) -> None:
    """Send a request over a socket of our own, and close it at the planned moment."""
    url = httpx.URL(client.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    body = json.dumps({"model": client.model, **visit.body()}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(body)}\r\n\r\n"
    data = head.encode() + body
    writer.write(data[: len(data) // 2] if visit.cut is Cut.IN_THE_BODY else data)
    await writer.drain()
    match visit.cut:
        case Cut.AFTER_EVENTS:
            for _ in range(visit.after_reads):
                if not await reader.read(200):
                    break
        case Cut.WHILE_WAITING:
            # Once another request has been answered: this one is with the nodes by then.
            assert (await http.get("/v1/models")).status_code == 200
        case _:
            pass
    if visit.reset:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def visit_all(client: Client, visits: Sequence[Visit]) -> list[Outcome | None]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(http: httpx.AsyncClient, visit: Visit) -> Outcome | None:
        async with gate:
            if visit.cut is None:
                return await client.follow(http, visit.body(), Outcome())
            await leave_early(client, http, visit)
            return None

    async with client.session() as http:
        return await asyncio.gather(*(one(http, visit) for visit in visits))


@pytest.mark.parametrize("name", ["pair", "colocated"])
def test_a_third_of_the_clients_leaves(name: str, request: pytest.FixtureRequest, cases: list[Case]) -> None:
    client: Client = request.getfixturevalue(name)
    draw = random.Random(11)
    gone_before = client.metric("baton_requests_total", outcome="client_gone")
    visits = plan(cases, draw, NUM_REQUESTS, cuts=True)

    outcomes = asyncio.run(visit_all(client, visits))

    client.assert_ledger_clean()
    stayed = [(v, o) for v, o in zip(visits, outcomes, strict=True) if o is not None]
    assert len(stayed) == NUM_REQUESTS * 2 // 3
    for visit, outcome in stayed:
        visit.case.check(outcome, visit.max_tokens)
    # Most of the cuts hit a request that was alive: the test is about something.
    gone = client.metric("baton_requests_total", outcome="client_gone") - gone_before
    assert gone > NUM_REQUESTS // 6

    after = plan(cases, draw, 50, cuts=False)
    for visit, late in zip(after, asyncio.run(visit_all(client, after)), strict=True):
        assert late is not None
        visit.case.check(late, visit.max_tokens)


def test_who_left_costs_nothing_more(pair: Client, cases: list[Case]) -> None:
    num_tokens = 400
    sampled = pair.metric("baton_node_tokens_sampled_total")
    cuts = (Cut.BEFORE_READING, Cut.AFTER_EVENTS, Cut.WHILE_WAITING)
    visits = [
        Visit(
            cases[i % 8], num_tokens, stream=cut is Cut.AFTER_EVENTS, cut=cut, after_reads=1, reset=i % 2 == 0
        )
        for i in range(20)
        for cut in cuts
    ]
    assert asyncio.run(visit_all(pair, visits)) == [None] * len(visits)
    pair.assert_ledger_clean()
    sampled = pair.metric("baton_node_tokens_sampled_total") - sampled
    assert sampled < len(visits) * num_tokens / 2
