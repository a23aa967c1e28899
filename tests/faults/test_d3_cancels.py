"""D3: clients that cancel, one after the other, must not end a process; tests/soak has a thousand of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cancels import assert_next_are_right, cancels, leave_all
from tests.system.client import Client
from tests.system.oracle import Case
from tests.system.server import running

pytestmark = pytest.mark.system

NUM_CANCELS = 150
NUM_STREAMS = 20


def test_d3_random_cancels(model: Path, cases: list[Case]) -> None:
    with running(model) as server:  # and nothing goes wrong in it
        client = Client(server.url, server.model)
        before = server.pids()
        leave_all(client, cancels(cases, NUM_CANCELS, seed=3), NUM_STREAMS)
        client.assert_ledger_clean()
        # Many of them left something that was alive.
        assert client.metric("baton_requests_total", outcome="client_gone") > NUM_CANCELS / 4
        assert_next_are_right(client, cases, seed=4)
        client.assert_ledger_clean()
        assert server.pids() == before
