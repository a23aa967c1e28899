"""Two gateway processes behind one port: both answer, count as one, and the death of one is nobody else's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from tests.system.client import Client, Outcome
from tests.system.oracle import Case, Oracle
from tests.system.server import START_S, Server, poll_until, running

pytestmark = pytest.mark.system

WORKERS = ("gateway-0", "gateway-1")
ENOUGH = 40  # connections: all go to one of two processes once in 10^12 times
LONG = 400


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running(model, "--gateway-workers", "2", calm=False) as server:
        yield server
        log = server.process.log()
        assert "Traceback" not in log, log
        assert "rejected message" not in log, log


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url, server.model)


@pytest.fixture(scope="module")
def long(oracle: Oracle) -> Case:
    """An answer that takes a while."""
    return oracle.case([7, 8, 9], LONG)


def workers(server: Server) -> dict[str, int]:
    """The gateways that run now, by name."""
    children = server.process.children()
    return {
        name: pid
        for pid, words in children.items()
        for name in WORKERS
        if "gateway" in words and any(word.endswith(f"/{name}.sock") for word in words)
    }


def anew(server: Server, path: str) -> httpx.Response:
    """Get a page over a connection of its own: whichever gateway takes it."""
    return httpx.get(server.url + path, timeout=30, verify=False)


def clients_of(pid: int) -> set[int]:
    """The ports of the clients that a gateway serves now."""
    found = psutil.Process(pid).net_connections("tcp")
    return {c.raddr.port for c in found if c.status == psutil.CONN_ESTABLISHED}


def test_both_answer_right_and_know_all_nodes(server: Server, client: Client, cases: Sequence[Case]) -> None:
    asked = [cases[i % len(cases)] for i in range(ENOUGH)]
    outcomes = client.ask_all([case.body(8, stream=bool(i % 2)) for i, case in enumerate(asked)])
    for case, outcome in zip(asked, outcomes, strict=True):
        case.check(outcome, 8)
    for _ in range(10):
        assert anew(server, "/ready").status_code == 200
        body = anew(server, "/debug/kv").json()
        assert {node["id"] for node in body["nodes"]} == {"prefill-0", "decode-0"}
    client.assert_ledger_clean()


def test_whichever_is_asked_shows_the_counts_of_both(
    server: Server, client: Client, cases: Sequence[Case]
) -> None:
    def counts() -> set[tuple[float, ...]]:
        names = ("baton_requests_total", "baton_prompt_tokens_total", "baton_requests_running")
        shown = set()
        for _ in range(10):
            again = Client(server.url, server.model)  # a connection of its own
            shown.add(tuple(again.metric(name) for name in names))
        return shown

    ((requests, prompt_tokens, running),) = counts()
    client.ask_all([cases[3].body(2)] * ENOUGH)
    assert counts() == {(requests + ENOUGH, prompt_tokens + ENOUGH * len(cases[3].prompt), running)}
    assert running == 0


def test_the_death_of_one_ends_its_requests_alone(server: Server, client: Client, long: Case) -> None:
    before = workers(server)
    assert set(before) == set(WORKERS)
    pending = [client.begin(long.body(stream=True)) for _ in range(ENOUGH)]
    poll_until(lambda: all(p.outcome.token_ids for p in pending), START_S, "all streams have begun")
    assert all(clients_of(pid) for pid in before.values()), "the kernel spread the connections over both"
    os.kill(before["gateway-0"], signal.SIGKILL)
    outcomes = [p.wait() for p in pending]
    whole = [outcome for outcome in outcomes if outcome.done]
    cut = [outcome for outcome in outcomes if not outcome.done]
    assert whole
    assert cut
    for outcome in whole:
        long.check(outcome)
    for outcome in cut:
        assert outcome.token_ids == long.answer[: len(outcome.token_ids)]
    client.assert_ledger_clean()
    poll_until(lambda: len(workers(server)) == len(WORKERS), START_S, "it is started again")
    assert workers(server)["gateway-1"] == before["gateway-1"]
    poll_until(lambda: set(joined(server)) == {2}, START_S, "both nodes have joined the new one")
    for outcome in client.ask_all([long.body(8)] * ENOUGH):
        long.check(outcome, 8)
    assert client.metric("baton_restarts_total", role="gateway") == 1
    client.assert_ledger_clean()


def joined(server: Server) -> set[int]:
    """How many nodes the gateways know, each that was asked."""
    return {len(anew(server, "/debug/kv").json()["nodes"]) for _ in range(20)}


def test_told_to_end_both_finish_what_they_have(model: Path, long: Case) -> None:
    with running(model, "--gateway-workers", "2") as server:
        client = Client(server.url, server.model)
        pending = [client.begin(long.body(stream=True)) for _ in range(16)]
        poll_until(lambda: all(p.outcome.token_ids for p in pending), START_S, "all streams have begun")
        tree = server.tree()
        server.process.popen.send_signal(signal.SIGTERM)
        outcomes: list[Outcome] = [p.wait() for p in pending]
        for outcome in outcomes:
            long.check(outcome)
        assert server.process.popen.wait(START_S) == 0
        server.assert_nothing_left(tree)
