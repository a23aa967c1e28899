"""Rows E of the catalogue: a prefill node dies and comes back; the decode node and its health go on.

vllm#49238 (E1), sglang PR#34289 (E2), sglang#16903 (E3), sglang#12779 (E4).
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from common.messages import Status
from common.peer import Peer
from gateway.router import Router
from tests.faults.by_hand import assert_unavailable, by_hand, start_gateway, wait_for_nodes
from tests.system.client import Client, Outcome
from tests.system.load import Fate, load, steady_load
from tests.system.oracle import Case
from tests.system.server import START_S, Process, poll_until, running
from tests.system.test_standalone import CHECKS, ByHand
from tests.wire.hellos import DECODE, PREFILL

NUM_AFTERWARDS = 8
NUM_CLIENTS = 8


@pytest.fixture
def processes(model: Path) -> Iterator[ByHand]:
    with by_hand(model) as processes:
        yield processes


def epoch(client: Client, role: str) -> int | None:
    """The epoch of the one node of a role that is there; None when there is none."""
    epochs = [node["epoch"] for node in client.get("/debug/kv").json()["nodes"] if node["role"] == role]
    return int(epochs[0]) if len(epochs) == 1 else None


def start_prefill(processes: ByHand, address: str, listen: str, name: str) -> Process:
    """Start one under the same name and address each time; `name` is its log's."""
    return processes.start(
        "prefill", "--join", address, "--listen", listen, "--node-id", "p", *CHECKS, name=name
    )


def start_pair(processes: ByHand, listen: str) -> tuple[Client, str]:
    """Start a gateway, a prefill node at that address, and a decode node."""
    client, address = start_gateway(processes)
    start_prefill(processes, address, listen, "first")
    processes.start("decode", "--join", address, "--node-id", "d", *CHECKS)
    wait_for_nodes(client, "decode", "prefill")
    processes.wait_ready()
    return client, address


def kill(process: Process) -> None:
    process.popen.kill()
    process.popen.wait()


def assert_right(client: Client, cases: list[Case]) -> None:
    for case, outcome in zip(cases, client.ask_all([case.body() for case in cases]), strict=True):
        case.check(outcome)


@pytest.mark.system
def test_e1_decode_node_survives_a_prefill_node_restarted_at_its_address(
    processes: ByHand, cases: list[Case]
) -> None:
    listen = f"ipc://{processes.folder}/p.sock"
    client, address = start_pair(processes, listen)
    assert_right(client, cases[:NUM_AFTERWARDS])
    old_p, old_d = epoch(client, "prefill"), epoch(client, "decode")
    kill(processes.processes.pop("first"))
    start_prefill(processes, address, listen, "second")
    poll_until(lambda: epoch(client, "prefill") not in (None, old_p), START_S, "a new epoch", processes.log)
    processes.wait_ready()
    assert_right(client, cases[:NUM_AFTERWARDS])
    client.assert_ledger_clean()
    assert epoch(client, "decode") == old_d
    decode = processes.processes["decode"]
    assert decode.log().count("linked to p, plane") == 2
    assert "Traceback" not in processes.log()
    processes.end()


@pytest.mark.system
def test_e2_a_prefill_node_replaced_behind_its_address_costs_one_failure_at_most(
    processes: ByHand, cases: list[Case]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    client, address = start_pair(processes, listen)
    old_p, decode = epoch(client, "prefill"), processes.processes["decode"]
    for name in ("second", "third"):
        kill(processes.processes.pop("first" if name == "second" else "second"))
        start_prefill(processes, address, listen, name)
        poll_until(lambda old=old_p: epoch(client, "prefill") not in (None, old), START_S, "a new epoch")  # type: ignore[misc]
        old_p = epoch(client, "prefill")
        poll_until(lambda: client.get("/ready").status_code == 200, START_S, "ready")
        outcomes = [client.ask(case.body(2)) for case in cases]
        failed = [i for i, outcome in enumerate(outcomes) if not outcome.succeeded]
        assert failed in ([], [0])
        for case, outcome in list(zip(cases, outcomes, strict=True))[len(failed) :]:
            case.check(outcome, 2)
    assert decode.popen.poll() is None
    client.assert_ledger_clean()
    processes.end()


def assert_healthy(response: httpx.Response) -> None:
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.system
def test_e3_a_prefill_node_dies_under_load_and_the_decode_node_goes_on(
    model: Path, cases: list[Case]
) -> None:
    with running(model, calm=False) as server:
        client, before = Client(server.url, server.model), server.nodes()
        fates = [Fate(case, Outcome()) for case in cases * 4]
        num_ended = itertools.count()

        async def strike(http: httpx.AsyncClient) -> None:
            if next(num_ended) == NUM_CLIENTS:
                os.kill(before["prefill-0"], signal.SIGKILL)
            assert_healthy(await http.get("/health"))

        steady_load(client, fates, NUM_CLIENTS, strike)
        assert all(fate.heard for fate in fates)
        assert {fate.outcome.status for fate in fates} <= {200, 503}
        poll_until(
            lambda: server.nodes().get("prefill-0") not in (None, before["prefill-0"]), START_S, "it is back"
        )
        server.wait_ready()
        assert_right(client, cases)
        client.assert_ledger_clean()
        assert server.nodes()["decode-0"] == before["decode-0"]
        assert "Traceback" not in server.process.log()


@pytest.mark.system
def test_e4_the_death_of_the_prefill_node_is_no_illness_of_the_decode_node(
    processes: ByHand, cases: list[Case]
) -> None:
    """Nobody starts it again."""
    client, _ = start_pair(processes, f"ipc://{processes.folder}/p.sock")
    decode = processes.processes["decode"]
    fates = load(client, cases * 2, lambda: kill(processes.processes.pop("first")))
    assert all(fate.heard for fate in fates)
    poll_until(lambda: epoch(client, "prefill") is None, START_S, "it is gone")
    for case in cases:
        assert_unavailable(client, case)
        assert_healthy(client.get("/health"))
    assert decode.popen.poll() is None
    assert client.get("/debug/kv").json()["nodes"][0]["id"] == "d"
    processes.end()


def test_e4_not_for_a_minute_and_longer() -> None:
    """What the gateway's /health asks, on a clock that is ours."""
    router = Router()
    decode, prefill = (
        Peer(greeting, number, "frames", cast(Any, None))
        for number, greeting in enumerate((DECODE, PREFILL), 1)
    )
    for peer in (decode, prefill):
        router.add(peer, 0.0)
    node = router.of(decode)
    assert node is not None
    node.reconciler.opened(1, 1)
    node.take_status(Status(last_seq_seen=1, open_ids=(1,), running=1, steps=5, usable=True), 1.0)
    router.remove(prefill, 2.0)
    node.reconciler.closed(1)  # it failed, or finished
    for second in range(3, 90):
        node.take_status(Status(last_seq_seen=1, open_ids=(), steps=6), float(second))
        assert router.stalled(float(second)) == ()
    assert router.nodes() == [node]
