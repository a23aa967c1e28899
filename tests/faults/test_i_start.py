"""I: processes that share a host, or that wait for each other, at start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.by_hand import assert_unavailable, by_hand, start_gateway, wait_for_nodes
from tests.system.client import Client
from tests.system.oracle import Case
from tests.system.server import Server, temporary_folder

pytestmark = pytest.mark.system


def test_i1_defaults_just_work_side_by_side(model: Path, cases: list[Case]) -> None:
    """All nodes of two servers start at the same time on one host, with no address given."""
    with temporary_folder() as one, temporary_folder() as other:
        servers = [Server(one, model), Server(other, model)]
        try:
            for server in servers:
                server.wait_ready()
            clients = [Client(server.url, server.model) for server in servers]
            for client in clients:
                for case, outcome in zip(
                    cases, client.ask_all([case.body(8) for case in cases]), strict=True
                ):
                    case.check(outcome, 8)
            for server in servers:
                server.stop()
                server.assert_calm()
        finally:
            for server in servers:
                server.process.kill()


@pytest.mark.parametrize(("first", "second"), [("decode", "prefill"), ("prefill", "decode")])
def test_i5_one_without_the_other_is_not_ready(
    model: Path, cases: list[Case], first: str, second: str
) -> None:
    """A request that nobody can serve is refused at once, and served as soon as the other is there."""
    with by_hand(model) as processes:
        client, address = start_gateway(processes)
        assert_unavailable(client, cases[2])
        processes.start(first, "--join", address)
        wait_for_nodes(client, first)
        assert_unavailable(client, cases[2])
        processes.start(second, "--join", address)
        processes.wait_ready()
        cases[2].check(client.ask(cases[2].body()))
        client.assert_ledger_clean()
        processes.end()
