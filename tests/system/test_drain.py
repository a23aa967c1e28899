"""SIGTERM: what runs is finished, what is new goes elsewhere, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.system.client import Client, Outcome
from tests.system.load import Fate, load, steady_load
from tests.system.oracle import Case
from tests.system.server import END_S, START_S, Server, poll_until, running
from tests.system.test_several_nodes import (
    NAMES,
    NUM_CLIENTS,
    assert_all_well,
    assert_sound,
    plan,
    restarts,
    wait_for_nodes,
)

pytestmark = pytest.mark.system

SHORT_GRACE_S = 1
NUM_REQUESTS = 60


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running(model, "--prefill", "2", "--decode", "2", calm=False) as server:
        yield server
        assert_sound(server, "shm")


@pytest.fixture
def client(server: Server) -> Client:
    client = Client(server.url, server.model)
    wait_for_nodes(client, NAMES)
    return client


def assert_unseen(fates: Sequence[Fate]) -> None:
    assert [fate for fate in fates if not (fate.heard and fate.outcome.succeeded)] == []


def assert_drained_once(server: Server, client: Client, name: str, before: dict[str, int]) -> None:
    """Check that it left by itself, was started again, and that the others stayed."""
    server.process.wait_for(rf"({name} ended with status 0; starting it again)")
    poll_until(lambda: server.nodes().get(name, before[name]) != before[name], START_S, f"{name} is back")
    wait_for_nodes(client, NAMES)
    assert {**server.nodes(), name: 0} == {**before, name: 0}


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_no_client_notices_that_a_node_of_two_is_told_to_end(
    server: Server, client: Client, cases: list[Case], name: str
) -> None:
    before, num_restarts = server.nodes(), restarts(client, "prefill", "decode")
    retried = client.metric("baton_gateway_requests_retried_total")
    many = [case for case in cases for _ in range(4)]
    fates = load(client, many, lambda: os.kill(before[name], signal.SIGTERM))
    assert_unseen(fates)
    # More had been submitted to the decode node than it had given pages.
    retried = client.metric("baton_gateway_requests_retried_total") - retried
    assert (retried > 0) is name.startswith("decode")
    assert_drained_once(server, client, name, before)
    assert_all_well(server, client, cases)
    assert restarts(client, "prefill", "decode") == num_restarts + 1


def test_no_client_notices_that_all_nodes_are_replaced_one_by_one(
    server: Server, client: Client, cases: list[Case]
) -> None:
    """A rolling update: each is told to end when the one before is back."""
    before = server.nodes()
    told: list[str] = []

    async def strike(http: httpx.AsyncClient) -> None:
        up = {node["id"] for node in (await http.get("/debug/kv")).json()["nodes"]}
        nodes = server.nodes()
        are_back = up == set(NAMES) and all(nodes.get(name) not in (None, before[name]) for name in told)
        if are_back and len(told) < len(NAMES):
            told.append(NAMES[len(told)])
            os.kill(before[told[-1]], signal.SIGTERM)

    end = time.monotonic() + 2 * START_S
    while len(told) < len(NAMES):
        assert time.monotonic() < end, f"only {told} in time"
        fates = plan(cases, NUM_REQUESTS, seed=len(told))
        steady_load(client, fates, NUM_CLIENTS, strike)
        assert_unseen(fates)
    for name in NAMES:
        assert_drained_once(server, client, name, {**server.nodes(), name: before[name]})
    assert_all_well(server, client, cases)


def test_a_decode_node_that_cannot_finish_leaves_when_its_grace_is_over(
    model: Path, cases: list[Case]
) -> None:
    with running(model, "--drain-grace", str(SHORT_GRACE_S), calm=False) as server:
        client, before = Client(server.url, server.model), server.nodes()
        outcomes: list[Outcome] = []
        waiting = threading.Thread(target=lambda: outcomes.extend(client.ask_all([c.body() for c in cases])))
        os.kill(before["prefill-0"], signal.SIGSTOP)  # nothing that is granted arrives
        try:
            waiting.start()
            poll_until(lambda: ledger(client, "decode-0")["incoming"] > 0, START_S, "pages are granted")
            start = time.monotonic()
            os.kill(before["decode-0"], signal.SIGTERM)
            waiting.join(START_S)
            assert not waiting.is_alive()
            assert time.monotonic() - start > SHORT_GRACE_S / 2, "it had its grace"
        finally:
            os.kill(before["prefill-0"], signal.SIGCONT)
        assert [outcome.status for outcome in outcomes] == [503] * len(cases)
        assert all(
            outcome.error is not None and int(outcome.headers["retry-after"]) > 0 for outcome in outcomes
        )
        poll_until(
            lambda: server.nodes().get("decode-0") not in (None, before["decode-0"]), START_S, "it is back"
        )
        server.wait_ready()
        for case, outcome in zip(cases, client.ask_all([case.body() for case in cases]), strict=True):
            case.check(outcome)
        client.assert_ledger_clean()


def ledger(client: Client, name: str) -> dict[str, int]:
    """The pages of a node; of one that is stopped there are none to see."""
    nodes = {node["id"]: node["pages"] for node in client.get("/debug/kv").json()["nodes"]}
    pages: dict[str, int] = nodes[name]
    return pages


# The whole server -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("whom", ["supervisor", "everybody"])  # systemd's default is everybody
def test_answers_that_have_begun_are_finished_before_a_server_ends(
    model: Path, cases: list[Case], whom: str
) -> None:
    with running(model) as server:
        client, tree = Client(server.url, server.model), server.tree()
        pids = [server.process.pid, *(server.pids().values() if whom == "everybody" else ())]

        def terminate() -> None:
            for pid in pids:
                os.kill(pid, signal.SIGTERM)

        fates = load(client, cases * 3, terminate)
        begun = [fate for fate in fates if fate.had_tokens or fate.outcome.succeeded]
        # Where the nodes are told, too, they give back what has no pages yet: that ends with 503.
        assert len(begun) > (len(fates) / 6 if whom == "supervisor" else 0)
        assert_unseen(begun)
        # Who came too late was not answered at all, or with an error.
        assert all(fate.heard or fate.outcome.status == 0 for fate in fates)
        assert server.process.popen.wait(END_S) == 0, server.process.log()
        server.assert_nothing_left(tree)


@pytest.mark.parametrize("hurry", [None, signal.SIGTERM, signal.SIGINT], ids=["grace", "term", "int"])
def test_answers_that_cannot_be_finished_end_with_an_error(
    model: Path, cases: list[Case], hurry: signal.Signals | None
) -> None:
    grace_s = SHORT_GRACE_S if hurry is None else 600
    with running(model, "--drain-grace", str(grace_s), calm=False) as server:
        client, tree = Client(server.url, server.model), server.tree()
        decode = server.nodes()["decode-0"]

        def stop_and_end() -> None:
            os.kill(decode, signal.SIGSTOP)
            server.process.popen.send_signal(signal.SIGTERM)
            if hurry is not None:
                server.process.wait_for(r"(told to end: no new requests)")
                server.process.popen.send_signal(hurry)

        fates = load(client, cases * 3, stop_and_end)
        assert server.process.popen.wait(END_S) == 0, server.process.log()
        server.assert_nothing_left(tree)
        assert "Traceback" not in server.process.log()
        cut = [fate for fate in fates if not fate.outcome.succeeded]
        assert all(fate.heard or fate.outcome.status == 0 for fate in fates)
        told = [fate.outcome.error["message"] for fate in cut if fate.outcome.error is not None]
        assert set(told) == {"the server is about to stop"}
