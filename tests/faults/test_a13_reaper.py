"""A13: time frees what is overdue although nothing can be scheduled; without progress /health says so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from common.messages import Hello, Status, Submit, int32s
from common.peer import Peer
from common.request import SamplingParams
from decode_node.entry import FailedOut, RequestKey
from decode_node.scheduler import DecodeScheduler
from gateway.router import STALLED_AFTER_S, Node, Router
from tests.nodes.test_decode_scheduler import IDLE, scheduler
from tests.system.client import Client
from tests.system.oracle import Case
from tests.system.server import Server, running
from tests.wire.hellos import DECODE, PREFILL

NUM_PAGES = 12
IN_TIME_S = 5.0  # for a deadline of 1 s; the rest for a busy machine


def submit(s: DecodeScheduler, request_id: int, prompt_len: int, timeout_ms: int | None = None) -> RequestKey:
    key, sampling = RequestKey(1, request_id), SamplingParams(max_tokens=1)
    message = Submit(request_id, sampling, int32s([5] * prompt_len), timeout_ms)
    s.submit(key, message, 0.0, longest_prompt=64)
    return key


def grant(s: DecodeScheduler, transfer_id: int) -> None:
    granted = s.admit(IDLE)
    assert granted is not None
    s.granted(granted, transfer_id, 0.0)


def test_a13_with_the_pool_leaked_by_aborts_those_who_wait_still_end() -> None:
    s = scheduler(max_queued=5)
    for request_id in (1, 2):
        key = submit(s, request_id, prompt_len=23)
        grant(s, request_id)
        assert s.abort(key) == request_id
    assert s.ledger().quarantined == NUM_PAGES, "somebody may still be writing all of it"
    waiting = [submit(s, request_id, prompt_len=4, timeout_ms=1000 * request_id) for request_id in (3, 4, 5)]
    assert s.admit(IDLE) is None
    assert s.next_step(0.0) is None
    for key in waiting:
        due_s = s.deadline()
        assert due_s == key.request_id
        assert s.expire(due_s) == []
        assert [(out.key, out.status) for out in s.out if isinstance(out, FailedOut)][-1] == (key, 504)
    assert (s.num_queued, s.keys_of(1)) == (0, [])
    assert s.ledger().quarantined == NUM_PAGES, "no time ends that"
    s.transfer_released(1)
    s.transfer_released(2)
    assert s.ledger().free == NUM_PAGES
    submit(s, 6, prompt_len=23)
    grant(s, 6)


def test_a13_what_time_frees_goes_to_who_waits() -> None:
    s = scheduler(colocated=True, max_queued=5)
    hog = submit(s, 1, prompt_len=46, timeout_ms=1000)  # the whole pool
    assert s.admit(()) is not None
    waiting = submit(s, 2, prompt_len=46)
    assert s.admit(()) is None
    assert s.expire(1.0) == []
    assert s.keys_of(1) == [waiting]
    assert [out.key for out in s.out] == [hog]
    assert s.admit(()) is not None


# /health ----------------------------------------------------------------------------------------------------


def join(router: Router, hello: Hello, epoch: int) -> Node:
    return router.add(
        Peer(replace(hello, node_id=f"{hello.role.value}-{epoch}"), epoch, "frames", cast(Any, None)), 0.0
    )


def status(**fields: int) -> Status:
    return Status(last_seq_seen=0, open_ids=(), **fields)


def hear(router: Router, until_s: int, statuses: dict[int, tuple[Node, Status]]) -> None:
    """Statuses once a second."""
    for now in range(1, until_s + 1):
        for node, said in statuses.values():
            node.take_status(replace(said, steps=said.steps * now), float(now))


LONG = int(STALLED_AFTER_S) + 10


def test_a13_who_finds_no_pages_and_makes_no_step_is_stalled() -> None:
    router = Router()
    p, d = join(router, PREFILL, 1), join(router, DECODE, 2)
    hear(router, LONG, {1: (p, status()), 2: (d, replace(status(queued=3), out_of_pages=True))})
    assert router.stalled(float(LONG)) == ("decode-2",)
    d.take_status(status(), LONG + 1.0)
    assert router.stalled(LONG + 1.0) == ()


def test_a13_who_waits_for_a_prefill_node_is_not_stalled_even_if_that_one_is() -> None:
    router = Router()
    p, d = join(router, PREFILL, 1), join(router, DECODE, 2)
    hear(router, LONG, {1: (p, status(running=1)), 2: (d, status(queued=3))})
    assert router.stalled(float(LONG)) == ("prefill-1",)
    # Silent itself, it is.
    d.reconciler.opened(5)
    assert router.stalled(2.0 * LONG) == ("prefill-1", "decode-2")


def test_a13_who_runs_requests_and_makes_no_step_is_stalled_whatever_others_do() -> None:
    router = Router()
    p, d = join(router, PREFILL, 1), join(router, DECODE, 2)
    hear(router, LONG, {1: (p, status(running=1, steps=1)), 2: (d, status(running=1))})
    assert router.stalled(float(LONG)) == ("decode-2",)


# A server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running(model, "--kv-pages", "40", "--transfer", "shm") as server:
        yield server


def pages(client: Client) -> dict[str, int]:
    """The decode node's."""
    (node,) = [node for node in client.get("/debug/kv").json()["nodes"] if node["role"] == "decode"]
    ledger: dict[str, int] = node["pages"]
    return ledger


@pytest.mark.system
def test_a13_a_stopped_prefill_node_holds_pages_but_no_clients(server: Server, cases: list[Case]) -> None:
    client = Client(server.url, server.model)
    prefill = server.pids()["prefill"]
    os.kill(prefill, signal.SIGSTOP)
    try:
        start = time.monotonic()
        outcomes = client.ask_all([cases[i % 16].body(timeout=1, stream=i % 2 == 0) for i in range(60)])
        assert time.monotonic() - start < IN_TIME_S
        assert {outcome.status for outcome in outcomes} == {504}
        assert {outcome.error["code"] for outcome in outcomes if outcome.error} == {"deadline_exceeded"}
        ledger = pages(client)
        assert (ledger["incoming"], ledger["active"]) == (0, 0)
        assert ledger["quarantined"] > 0, "it may still write into them when it wakes"
        assert ledger["quarantined"] + ledger["free"] == ledger["total"]
        assert client.get("/health").status_code == 200
    finally:
        os.kill(prefill, signal.SIGCONT)
    client.assert_ledger_clean()
    for case, outcome in zip(cases, client.ask_all([case.body() for case in cases]), strict=True):
        case.check(outcome)
