"""A thousand clients leave at random moments: no process ends, no page is lost, and what follows is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.cancels import assert_next_are_right, cancels, leave_all
from tests.soak.memory import FEW_PAGES, rss_mib
from tests.soak.settings import setting
from tests.system.client import Client
from tests.system.oracle import Case
from tests.system.server import running

pytestmark = pytest.mark.soak

NUM_CANCELS = setting("CANCELS", 1000)
NUM_STREAMS = 20
MOST_GROWTH_MIB = 128.0  # of all processes together, from the first half to the end


def test_random_cancels(model: Path, cases: list[Case], say: Callable[[str], None]) -> None:
    with running(model, "--kv-pages", str(FEW_PAGES)) as server:
        client = Client(server.url, server.model)
        before = server.pids()
        visits = cancels(cases, NUM_CANCELS, seed=31)
        first = visits[: NUM_CANCELS // 2]
        leave_all(client, first, NUM_STREAMS)
        warm_mib, start = rss_mib(server), time.monotonic()
        leave_all(client, visits[len(first) :], NUM_STREAMS)
        took_s, after_mib = time.monotonic() - start, rss_mib(server)
        client.assert_ledger_clean()
        gone = client.metric("baton_requests_total", outcome="client_gone")
        say(
            f"{NUM_CANCELS} cancels at {NUM_STREAMS} streams, the second half in {took_s:.1f} s; "
            f"{gone:.0f} seen as such; memory {warm_mib:.0f} MiB before it, {after_mib:.0f} after it"
        )
        assert gone > NUM_CANCELS / 4
        assert after_mib - warm_mib < MOST_GROWTH_MIB
        assert_next_are_right(client, cases, seed=32)
        client.assert_ledger_clean()
        assert server.pids() == before
