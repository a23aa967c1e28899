"""Two servers side by side on one machine, and how each of them ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.client import Client
from tests.system.load import load
from tests.system.oracle import Case
from tests.system.server import START_S, Server, temporary_folder

pytestmark = pytest.mark.system


@pytest.fixture
def neighbours(model: Path) -> Iterator[tuple[Server, Server]]:
    """Two servers of the same model, started at the same time."""
    with temporary_folder() as one, temporary_folder() as other:
        servers = (Server(one, model), Server(other, model))
        try:
            yield servers
        finally:
            for server in servers:
                server.process.kill()


def test_two_servers_and_their_ends(neighbours: tuple[Server, Server], cases: list[Case]) -> None:
    first, second = neighbours
    for server in neighbours:
        server.wait_ready()
    clients = [Client(server.url, server.model) for server in neighbours]
    for case in cases[:4]:
        for client in clients:
            case.check(client.ask(case.body(8)), 8)

    # Ctrl-C under load: the first is over in time, with nothing left; the second does not notice.
    fates = load(clients[0], cases * 4, lambda: first.stop(signal.SIGINT))
    assert all(fate.heard or not fate.outcome.done for fate in fates)
    first.assert_calm()
    for case in cases[:4]:
        case.check(clients[1].ask(case.body(8)), 8)

    # kill -9 of the second under load: its children end by themselves and take its folder along.
    tree = second.tree()
    load(clients[1], cases * 4, second.process.popen.kill)
    second.assert_nothing_left(tree)


def test_sigterm_before_it_is_ready(model: Path) -> None:
    with temporary_folder() as folder:
        server = Server(folder, model)
        try:
            server.process.wait_for("is ready()")
            server.stop(signal.SIGTERM)
            server.assert_calm()
        finally:
            server.process.kill()


def test_taken_port_is_one_clear_line(pair: Client, model: Path) -> None:
    port = pair.url.rpartition(":")[2]
    with temporary_folder() as folder:
        late = Server(folder, model, "--port", port)
        try:
            assert late.process.popen.wait(START_S) == 2
            assert late.process.log() == (
                f"baton: port {port} is taken: choose another with --port (0 lets the system pick one)\n"
            )
        finally:
            late.process.kill()
