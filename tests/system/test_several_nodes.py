"""Two prefill and two decode nodes: any of them is killed, stopped or joins at any time, under load.

Every request is right or an error, in time; whom it does not concern does not notice; afterwards all is as
before.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.system.client import Client, Outcome
from tests.system.load import Fate, load, steady_load
from tests.system.oracle import Case
from tests.system.server import START_S, Process, Server, poll_until, running

pytestmark = pytest.mark.system

PREFILLS = ("prefill-0", "prefill-1")
DECODES = ("decode-0", "decode-1")
NAMES = (*DECODES, *PREFILLS)
NUM_CLIENTS = 16
KILL_EVERY_S = 2.0
KILL_EVERY_REQUESTS = 75
ENDED_S = 15.0  # promised: an answer or an error within so long, whatever dies
CLEAN_S = 5.0
STALL_TIMEOUT_S = 4
MAX_TOKENS = (1, 2, 9, 33, 64)
NUM_AFTERWARDS = 50


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    """On the default plane, shared memory."""
    args = ("--prefill", "2", "--decode", "2", "--stall-timeout", str(STALL_TIMEOUT_S))
    with running(model, *args, calm=False) as server:
        yield server
        assert_sound(server, "shm")


@pytest.fixture
def client(server: Server) -> Client:
    client = Client(server.url, server.model)
    wait_for_nodes(client, NAMES)
    wait_for_links(server, Counter())
    return client


def assert_sound(server: Server, plane: str) -> None:
    """Check that no process had a bug, or bytes that it did not understand; and which plane was used."""
    log = server.process.log()
    assert set(re.findall(r"linked to \S+, plane (\S+)", log)) == {plane}
    assert "Traceback" not in log, log
    assert "rejected message" not in log, log


def nodes(client: Client) -> list[str]:
    body = client.get("/debug/kv").json()
    return sorted(node["id"] for node in body["nodes"] if node["id"] not in body["missing"])


def wait_for_nodes(client: Client, names: Sequence[str]) -> None:
    poll_until(lambda: nodes(client) == sorted(names), START_S, f"{names} are there")


def links(server: Server) -> Counter[tuple[str, str]]:
    """How often each decode node has linked to each prefill node."""
    log = server.process.log()
    return Counter({(d, p): log.count(f"{d}: linked to {p}, plane ") for d in DECODES for p in PREFILLS})


def wait_for_links(server: Server, before: Counter[tuple[str, str]], names: Sequence[str] = PREFILLS) -> None:
    """Wait until every decode node has linked anew to these prefill nodes."""
    pairs = [(d, p) for d in DECODES for p in names]
    poll_until(
        lambda: all(links(server)[pair] > before[pair] for pair in pairs), START_S, "all pairs are linked"
    )


def plan(cases: Sequence[Case], count: int, seed: int) -> list[Fate]:
    """Requests of many lengths."""
    draw = random.Random(seed)
    return [Fate(draw.choice(cases), Outcome(), max_tokens=draw.choice(MAX_TOKENS)) for _ in range(count)]


def assert_all_heard(fates: Sequence[Fate]) -> None:
    assert [fate for fate in fates if not fate.heard] == []
    assert {f.outcome.status for f in fates} <= {200, 500, 503}
    assert max(fate.took_s for fate in fates) < ENDED_S


def assert_right(client: Client, fates: Sequence[Fate]) -> None:
    """Send all at once, and check that every answer is right."""
    outcomes = client.ask_all([fate.case.body(fate.max_tokens) for fate in fates])
    for fate, outcome in zip(fates, outcomes, strict=True):
        fate.case.check(outcome, fate.max_tokens)


def assert_all_well(server: Server, client: Client, cases: Sequence[Case]) -> None:
    """Check that all four are back, that no page was lost, and that what follows is right."""
    wait_for_nodes(client, NAMES)
    server.wait_ready()
    client.assert_ledger_clean(CLEAN_S)
    assert_right(client, plan(cases, NUM_AFTERWARDS, seed=3))
    client.assert_ledger_clean()


def restarts(client: Client, *roles: str) -> int:
    return int(sum(client.metric("baton_restarts_total", role=role) for role in roles))


@dataclass
class Storm:
    """Kills a node that is up every two seconds as long as the load lasts, or sooner where it is fast."""

    server: Server
    draw: random.Random
    killed: list[str] = field(default_factory=list)
    _due_s: float = 0.0
    _ended: int = 0  # requests since then

    async def strike(self, http: httpx.AsyncClient) -> None:
        """Kill one, if it is time."""
        self._ended += 1
        if time.monotonic() < self._due_s and self._ended < KILL_EVERY_REQUESTS:
            return
        up = {node["id"] for node in (await http.get("/debug/kv")).json()["nodes"]}
        alive = {name: pid for name, pid in sorted(self.server.nodes().items()) if name in up}
        if alive:
            name = self.draw.choice(list(alive))
            os.kill(alive[name], signal.SIGKILL)
            self.killed.append(name)
            self._ended = 0
        self._due_s = time.monotonic() + KILL_EVERY_S


def storm(server: Server, client: Client, cases: Sequence[Case], count: int, seed: int) -> None:
    """Send `count` requests while nodes are killed; check all that was promised."""
    fates = plan(cases, count, seed)
    before, num_restarts = server.nodes(), restarts(client, "prefill", "decode")
    weather = Storm(server, random.Random(seed))
    steady_load(client, fates, NUM_CLIENTS, weather.strike)
    assert_all_heard(fates)
    succeeded = sum(fate.outcome.succeeded for fate in fates)
    assert len(weather.killed) >= 2
    assert succeeded > count / 4
    assert_all_well(server, client, cases)
    # Nobody died but by our hand.
    assert restarts(client, "prefill", "decode") == num_restarts + len(weather.killed)
    for name in set(NAMES) - set(weather.killed):
        assert server.nodes()[name] == before[name]
    assert restarts(client, "gateway") == 0


def test_every_request_is_right_or_an_error_while_nodes_are_killed(
    server: Server, client: Client, cases: list[Case]
) -> None:
    storm(server, client, cases, 500, seed=1)


def test_prefill_nodes_die_unseen_while_another_is_there(
    server: Server, client: Client, cases: list[Case]
) -> None:
    before = server.nodes()
    for name in PREFILLS:
        failed = client.metric("baton_node_transfers_failed_total")
        fates, linked, num_ended = plan(cases[-8:], 60, seed=2), links(server), itertools.count()

        async def strike(
            _: httpx.AsyncClient, pid: int = before[name], ended: itertools.count[int] = num_ended
        ) -> None:
            """Stop it first, so that it surely has work when it dies."""
            match next(ended):
                case 5:
                    os.kill(pid, signal.SIGSTOP)
                case 15:
                    with suppress(ProcessLookupError):  # the supervisor was faster
                        os.kill(pid, signal.SIGKILL)

        steady_load(client, fates, NUM_CLIENTS, strike)
        assert_all_heard(fates)
        assert [fate for fate in fates if not fate.outcome.succeeded] == []
        assert client.metric("baton_node_transfers_failed_total") > failed
        wait_for_links(server, linked, [name])
    assert_all_well(server, client, cases)
    assert {name: server.nodes()[name] for name in DECODES} == {name: before[name] for name in DECODES}


def test_requests_on_one_decode_node_do_not_notice_the_death_of_the_other(
    server: Server, client: Client, cases: list[Case]
) -> None:
    before = server.nodes()
    many = [case for case in cases for _ in range(2)]
    submitted = client.metric("baton_node_requests_submitted_total", node="decode-1")
    fates = load(client, many, lambda: os.kill(before["decode-0"], signal.SIGKILL))
    submitted = client.metric("baton_node_requests_submitted_total", node="decode-1") - submitted
    assert_all_heard(fates)
    assert max(fate.ended_s for fate in fates) < ENDED_S
    succeeded = sum(fate.outcome.succeeded for fate in fates)
    assert 0 < submitted <= succeeded < len(fates)
    assert_all_well(server, client, cases)
    assert {**server.nodes(), "decode-0": 0} == {**before, "decode-0": 0}


def test_requests_of_a_stopped_prefill_node_are_tried_again_elsewhere(
    server: Server, client: Client, cases: list[Case]
) -> None:
    before, num_restarts = server.nodes(), restarts(client, "prefill", "decode")
    failed, linked = client.metric("baton_node_transfers_failed_total"), links(server)
    fates, num_ended = plan(cases[-8:], 60, seed=4), itertools.count()

    async def strike(_: httpx.AsyncClient) -> None:
        if next(num_ended) == 5:
            os.kill(before["prefill-0"], signal.SIGSTOP)

    steady_load(client, fates, NUM_CLIENTS, strike)
    assert_all_heard(fates)
    assert [fate for fate in fates if not fate.outcome.succeeded] == []
    assert client.metric("baton_node_transfers_failed_total") > failed
    wait_for_links(server, linked, ["prefill-0"])  # its successor
    assert_all_well(server, client, cases)
    assert restarts(client, "prefill", "decode") == num_restarts + 1
    assert {**server.nodes(), "prefill-0": 0} == {**before, "prefill-0": 0}


def test_node_started_by_hand_joins_works_and_leaves(
    server: Server, client: Client, cases: list[Case], tmp_path: Path
) -> None:
    address = server.process.wait_for(r"nodes join (ipc://\S+)")
    # Decode nodes refuse who does not make checksums as they want them (SERVE_ARGS).
    args = ("--join", address, "--node-id", "by-hand", "--local-nodes", "5", "--verify-pages")
    node = Process(server.temp_dir, tmp_path / "log", "prefill", server.model, *args)
    try:
        wait_for_nodes(client, [*NAMES, "by-hand"])

        def all_compute() -> bool:
            assert_right(client, plan(cases, 8, seed=5))
            return all(client.metric("baton_node_steps_total", node=n) > 0 for n in (*NAMES, "by-hand"))

        poll_until(all_compute, START_S, "every node has computed something")
        client.assert_ledger_clean()
        node.end(signal.SIGTERM)
    finally:
        node.kill()
    # It stays named as missing for a while, so the ledger is not asked for any more.
    wait_for_nodes(client, NAMES)
    assert_right(client, plan(cases, NUM_AFTERWARDS, seed=6))


def test_nodes_are_killed_on_the_plane_frames(model: Path, cases: list[Case]) -> None:
    with running(model, "--prefill", "2", "--decode", "2", "--transfer", "frames", calm=False) as server:
        client = Client(server.url, server.model)
        wait_for_nodes(client, NAMES)
        storm(server, client, cases, 120, seed=6)
        assert_sound(server, "frames")
