"""Processes are killed or stopped under load: every client hears, the process comes back, the others stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.client import Client
from tests.system.load import Fate, load
from tests.system.oracle import Case, Oracle
from tests.system.server import START_S, Server, poll_until, running

pytestmark = pytest.mark.system

HEARD_S = 10.0  # promised: an answer or an error within so long of a kill
NUM_REQUESTS = 48
NUM_AFTERWARDS = 8
NUM_TOKENS = 200
STALL_TIMEOUT_S = 4


@pytest.fixture(scope="module")
def _server(model: Path) -> Iterator[Server]:
    with running(model, "--stall-timeout", str(STALL_TIMEOUT_S), calm=False) as server:
        yield server


@pytest.fixture
def server(_server: Server) -> Iterator[Server]:
    """A working server whose processes die by our hand only."""
    yield _server
    assert "Traceback" not in _server.process.log()


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url, server.model)


@pytest.fixture(scope="module")
def long_cases(oracle: Oracle, cases: list[Case]) -> list[Case]:
    """Prompts and answers that take a while; more of them than the prefill node computes at once."""
    few = [oracle.case(case.prompt, NUM_TOKENS) for case in cases[-3:]]
    return [few[i % 3] for i in range(NUM_REQUESTS)]


def strike(
    server: Server, client: Client, cases: list[Case], role: str, signum: signal.Signals
) -> list[Fate]:
    """Signal a process under load; return how the clients fared, when all works again."""
    before = server.pids()
    restarts = client.metric("baton_restarts_total", role=role)
    assert len(before) == 3
    fates = load(client, cases, lambda: os.kill(before[role], signum))

    def others_stayed_and_it_is_back() -> bool:
        pids = server.pids()
        assert {**before, role: None} == {**before, **pids, role: None}
        return pids.get(role, before[role]) != before[role]

    poll_until(others_stayed_and_it_is_back, START_S, f"{role} is started again")
    server.wait_ready()
    for case, outcome in zip(
        cases, client.ask_all([case.body() for case in cases[:NUM_AFTERWARDS]]), strict=False
    ):
        case.check(outcome)
    client.assert_ledger_clean()
    assert others_stayed_and_it_is_back()
    assert client.metric("baton_restarts_total", role=role) == restarts + 1
    return fates


def assert_all_heard(fates: list[Fate]) -> None:
    assert [fate for fate in fates if not fate.heard] == []
    assert max(fate.ended_s for fate in fates) < HEARD_S


def test_killed_prefill_node(server: Server, client: Client, long_cases: list[Case]) -> None:
    fates = strike(server, client, long_cases, "prefill", signal.SIGKILL)
    assert_all_heard(fates)
    # Who had tokens did not notice.
    assert all(fate.outcome.succeeded for fate in fates if fate.had_tokens)
    failed = [fate.outcome for fate in fates if not fate.outcome.succeeded]
    assert failed
    assert {outcome.status for outcome in failed} == {503}
    assert all(int(outcome.headers["retry-after"]) > 0 for outcome in failed)


def test_killed_decode_node(server: Server, client: Client, long_cases: list[Case]) -> None:
    fates = strike(server, client, long_cases, "decode", signal.SIGKILL)
    assert_all_heard(fates)
    # It hit answers that had begun, and requests that had not.
    assert {fate.had_tokens for fate in fates if not fate.outcome.succeeded} == {True, False}


def test_killed_gateway(server: Server, client: Client, long_cases: list[Case]) -> None:
    sampled = client.metric("baton_node_tokens_sampled_total")
    fates = strike(server, client, long_cases, "gateway", signal.SIGKILL)
    sampled = client.metric("baton_node_tokens_sampled_total") - sampled
    # The decode node gave up what nobody would read any more.
    assert sampled < NUM_REQUESTS * NUM_TOKENS / 2 + NUM_AFTERWARDS * NUM_TOKENS
    assert max(fate.ended_s for fate in fates) < HEARD_S
    assert not all(fate.outcome.succeeded for fate in fates)


def test_stopped_prefill_node(server: Server, client: Client, long_cases: list[Case]) -> None:
    fates = strike(server, client, long_cases, "prefill", signal.SIGSTOP)
    assert_all_heard(fates)
    assert all(fate.outcome.succeeded for fate in fates if fate.had_tokens)


def test_stopped_decode_node(server: Server, client: Client, long_cases: list[Case]) -> None:
    assert_all_heard(strike(server, client, long_cases, "decode", signal.SIGSTOP))


def test_request_while_no_prefill_node_is_there(
    server: Server, client: Client, long_cases: list[Case]
) -> None:
    os.kill(server.pids()["prefill"], signal.SIGKILL)
    outcomes = [client.ask(long_cases[0].body(1)) for _ in range(20)]
    assert {outcome.status for outcome in outcomes} <= {200, 503}
    server.wait_ready()
    outcome = client.ask(long_cases[0].body(1))
    long_cases[0].check(outcome, 1)
