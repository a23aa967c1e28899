"""Deaths of real processes count once, where they should; who leaves as it was told counts nowhere."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.messages import Role
from gateway.failures import Failure
from tests.faults.failure_counts import Counts, failures_in
from tests.system.client import WAIT_S, Client, greedy
from tests.system.server import START_S, Server, poll_until, running

pytestmark = pytest.mark.system

ENOUGH = 20  # connections: all go to one of two gateways once in a million times
# Who is ended, how, and what counts then.
ENDS: tuple[tuple[str, int, dict[tuple[Role, Failure], int]], ...] = (
    ("prefill-0", signal.SIGTERM, {}),
    ("prefill-0", signal.SIGKILL, {(Role.DECODE, Failure.PREFILL_LOST): 1}),
    ("gateway-0", signal.SIGTERM, {}),
    ("gateway-1", signal.SIGKILL, {(Role.DECODE, Failure.GATEWAY_LOST): 1}),
    ("decode-0", signal.SIGKILL, {(Role.GATEWAY, Failure.DECODE_LOST): 2}),  # at both gateways
)


def pid_of(server: Server, name: str) -> int | None:
    """The process that runs now under a name."""
    role = name.partition("-")[0]
    found = (
        pid
        for pid, words in server.process.children().items()
        if role in words[:4] and (role != "gateway" or any(word.endswith(f"/{name}.sock") for word in words))
    )
    return next(found, None)


def anew(server: Server, path: str) -> httpx.Response:
    """Get a page over a connection of its own: of whichever gateway takes it."""
    return httpx.get(server.url + path, timeout=30)


def failures(server: Server) -> Counts:
    return failures_in(anew(server, "/metrics").text)


def until_whole(server: Server) -> None:
    """Wait until all processes are there again, and know each other."""

    def sees_all() -> bool:
        try:
            gateways = {anew(server, "/debug/requests").json()["gateway"] for _ in range(ENOUGH)}
            pages = [anew(server, "/debug/kv").json() for _ in range(ENOUGH)]
            ready = [anew(server, "/ready").status_code == 200 for _ in range(ENOUGH)]
        except httpx.TransportError:  # one that is about to leave took the connection
            return False
        sees_both = all(len(page["nodes"]) == 2 and not page["missing"] for page in pages)
        return len(gateways) == 2 and sees_both and all(ready)

    poll_until(sees_all, START_S, "all are there again")


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    with running(model, "--gateway-workers", "2", calm=False) as server:
        yield server


def replace_process(server: Server, name: str, signum: int) -> None:
    """End a process, and wait until its successor has its place."""
    before = pid_of(server, name)
    os.kill(before, signum)
    poll_until(lambda: pid_of(server, name) not in (None, before), START_S, f"the successor of {name}")
    until_whole(server)


def check_failures(server: Server, expected: Counts) -> None:
    """Gateways tell each other twice a second what they have counted."""
    poll_until(
        lambda: +failures(server) == expected,
        WAIT_S,
        f"{expected} is counted",
        lambda: f"{failures(server)}\n{server.process.log()[-3000:]}",
    )


def test_a_death_counts_once_and_leaving_does_not(server: Server) -> None:
    client = Client(server.url, server.model)
    expected: Counts = Counter()
    restarts: Counter[tuple[str, str]] = Counter()
    until_whole(server)
    for name, signum, counts in ENDS:
        replace_process(server, name, signum)
        if name == "decode-0":  # what it counted is gone with it
            expected.clear()
        expected.update(counts)
        check_failures(server, expected)
        restarts[name.partition("-")[0], "left" if signum == signal.SIGTERM else "died"] += 1
        for (role, reason), number in restarts.items():
            assert client.metric("baton_restarts_total", role=role, reason=reason) == number
        assert client.ask(greedy([5, 6, 7], 4)).token_ids
