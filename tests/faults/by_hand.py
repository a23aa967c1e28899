"""Processes that a test starts one by one, each with a log of its own, and what a client hears meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.system.client import Client
from tests.system.oracle import Case
from tests.system.server import START_S, poll_until, temporary_folder
from tests.system.test_standalone import ByHand

AT_ONCE_S = 1.0  # promised: who cannot be served hears so within a second


@contextmanager
def by_hand(model: Path) -> Iterator[ByHand]:
    """A folder for them; whatever still runs at the end is killed."""
    with temporary_folder() as folder:
        processes = ByHand(folder, model)
        try:
            yield processes
        finally:
            for process in processes.processes.values():
                process.kill()


def start_gateway(processes: ByHand) -> tuple[Client, str]:
    """Start the gateway; returns a client of it, and where nodes join."""
    gateway = processes.start("gateway", "--nodes", f"ipc://{processes.folder}/gateway.sock", "--port", "0")
    address = gateway.wait_for(r"nodes join (ipc://\S+)")
    return Client(gateway.wait_for(r"listening on (http://127.0.0.1:\d+)"), processes.model), address


def wait_for_nodes(client: Client, *roles: str) -> None:
    """Wait until nodes of these roles have joined, and no others."""

    def joined() -> bool:
        return sorted(node["role"] for node in client.get("/debug/kv").json()["nodes"]) == sorted(roles)

    poll_until(joined, START_S, f"{roles} have joined")


def assert_unavailable(client: Client, case: Case) -> None:
    """Check that nobody is told that it is ready, and that every kind of call hears 503 at once."""
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200  # the gateway itself is well
    for stream in (False, True):
        start = time.monotonic()
        outcome = client.ask(case.body(stream=stream))
        took_s = time.monotonic() - start
        assert outcome.status == 503, outcome
        assert outcome.error is not None
        assert outcome.error["message"]
        assert int(outcome.headers["retry-after"]) > 0
        assert took_s < AT_ONCE_S
