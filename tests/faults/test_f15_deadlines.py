"""F15: a deadline counts in every phase. Who is overdue hears 504, holds nothing, and disturbs nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.messages import Submit, int32s
from common.request import SamplingParams
from decode_node.entry import FailedOut, Phase, RequestKey
from decode_node.scheduler import DecodeScheduler
from tests.nodes.test_decode_scheduler import IDLE, arrive, drawn, prebuild, scheduler
from tests.nodes.test_retraction import World
from tests.system.client import Client, Outcome, greedy
from tests.system.oracle import Case
from tests.system.server import Server, running

KEY = RequestKey(1, 1)
TRANSFER = 7
NUM_PAGES = 12
IN_TIME_S = 5.0  # for a deadline of 1 s: one more where the gateway has to say it; a busy machine


# The decode node's scheduler, in every phase ------------------------------------------------------------


def submitted(**changes: bool) -> DecodeScheduler:
    """A request with a deadline at 10 s."""
    s = scheduler(**changes)
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    s.submit(KEY, Submit(1, sampling, int32s([5] * 5), timeout_ms=10_000), 0.0, longest_prompt=64)
    return s


def granted() -> DecodeScheduler:
    s = submitted()
    grant = s.admit(IDLE)
    assert grant is not None
    s.granted(grant, TRANSFER, 1.0)
    return s


def to_be_tried_again() -> DecodeScheduler:
    s = granted()
    s.transfer_gave_out(TRANSFER, 503, "gone", retryable=True, can_prefill=True)
    s.transfer_released(TRANSFER)
    return s


def arrived() -> DecodeScheduler:
    s = submitted()
    arrive(s, TRANSFER)
    return s


def decoding() -> DecodeScheduler:
    s = arrived()
    prebuild(s)
    return s


def prefilling() -> DecodeScheduler:
    s = submitted(colocated=True)
    assert s.admit(()) is not None
    return s


@pytest.mark.parametrize(
    ("reach", "phase", "quarantined"),
    [
        (submitted, Phase.QUEUED, 0),
        (granted, Phase.TRANSFERRING, 2),
        (to_be_tried_again, Phase.QUEUED, 0),
        (arrived, Phase.ARRIVED, 0),
        (decoding, Phase.RUNNING, 0),
        (prefilling, Phase.PREFILLING, 0),
    ],
)
def test_f15_in_every_phase(reach: Callable[[], DecodeScheduler], phase: Phase, quarantined: int) -> None:
    s = reach()
    s.out.clear()
    assert s._entries[KEY].phase is phase
    assert s.deadline() == 10.0
    assert s.expire(9.999) == []
    assert s.out == []
    assert s.expire(10.0) == ([TRANSFER] if quarantined else [])
    assert [(out.key, out.status) for out in s.out if isinstance(out, FailedOut)] == [(KEY, 504)]
    assert len(s.out) == 1
    assert s.keys_of(1) == []
    assert (s.ledger().quarantined, s.ledger().free) == (quarantined, NUM_PAGES - quarantined)
    s.transfer_released(TRANSFER)
    assert s.ledger().free == NUM_PAGES
    assert s.deadline() is None
    assert s.expire(1e9) == []
    s.check_invariants()


def test_f15_a_step_in_flight_keeps_its_pages_until_it_was_processed() -> None:
    s = decoding()
    step = s.next_step(9.0)
    assert step is not None
    assert s.expire(10.0) == []
    assert s.ledger().quarantined == 2
    s.out.clear()
    s.process(step, drawn(11), 10.5)
    assert s.out == []
    assert s.ledger().free == NUM_PAGES


def test_f15_a_retracted_request_ends_and_the_others_do_not_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.admission.NEAR_TOKENS", 4)
    world = World(overlap=True, num_pages=6, max_running=4, num_rows=8)
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    old, young = RequestKey(1, 1), RequestKey(1, 2)
    for key, timeout_ms in ((old, None), (young, 10_000)):
        message = Submit(key.request_id, sampling, int32s([5] * 4), timeout_ms)
        world.s.submit(key, message, 0.0, longest_prompt=64)
    while not world.s.num_retracted:
        world.turn()
    assert world.s._entries[young].phase is Phase.QUEUED
    assert world.s.expire(10.0) == []
    outs, world.s.out = world.s.out, []
    assert [(out.key, out.status) for out in outs if isinstance(out, FailedOut)] == [(young, 504)]
    world.run(200)
    assert len(world.told[old]) == 16
    assert world.s.ledger().free == 6


def test_f15_what_ended_in_time_or_has_no_deadline_is_left_alone() -> None:
    s = submitted()
    s.submit(RequestKey(1, 2), Submit(2, SamplingParams(max_tokens=1), int32s([5])), 0.0, longest_prompt=64)
    s.abort(KEY)
    assert s.deadline() is None
    assert s.expire(1e9) == []
    assert s.keys_of(1) == [RequestKey(1, 2)]
    assert s.out == []


# A server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _server(model: Path) -> Iterator[Server]:
    with running(model, "--kv-pages", "40", "--max-running", "3") as server:
        yield server


@pytest.fixture
def server(_server: Server) -> Iterator[Server]:
    """A server of few pages; every test leaves it idle."""
    yield _server
    Client(_server.url, _server.model).assert_ledger_clean()


def check_overdue(outcome: Outcome) -> None:
    """A status, or the last event of a stream that began; never an end that looks whole."""
    assert outcome.error is not None, outcome
    assert outcome.error["type"] == "server_error"
    assert outcome.error["code"] == "deadline_exceeded"
    assert outcome.status == 504 or (outcome.status == 200 and not outcome.done), outcome


@pytest.mark.system
def test_f15_a_saturated_server_answers_in_time_and_is_as_before(server: Server, cases: list[Case]) -> None:
    client = Client(server.url, server.model)
    # Three at a time, of 120: not within a second.
    bodies = [greedy(cases[-3].prompt, 300, stream=i % 2 == 0, timeout=1) for i in range(120)]
    start = time.monotonic()
    outcomes = client.ask_all(bodies)
    assert time.monotonic() - start < IN_TIME_S
    overdue = [outcome for outcome in outcomes if not outcome.succeeded]
    assert len(overdue) > 60
    for outcome in overdue:
        check_overdue(outcome)
    client.assert_ledger_clean()
    assert client.metric("baton_node_requests_expired_total") > 60, "the decode node is the first to say so"
    assert client.get("/health").status_code == 200
    for case, outcome in zip(cases, client.ask_all([case.body() for case in cases]), strict=True):
        case.check(outcome)


@pytest.mark.system
def test_f15_the_gateway_speaks_for_a_stopped_decode_node(server: Server, cases: list[Case]) -> None:
    client = Client(server.url, server.model)
    decode = server.pids()["decode"]
    begun, whole, stream = Outcome(), Outcome(), Outcome()

    async def story() -> None:
        async with client.session() as http, asyncio.timeout(2 * IN_TIME_S):
            body = greedy([5, 6, 7], 500, stream=True, timeout=2)
            first = asyncio.create_task(client.follow(http, body, begun))
            while not begun.token_ids:
                assert not first.done(), begun
                await asyncio.sleep(0.001)
            os.kill(decode, signal.SIGSTOP)
            start = time.monotonic()
            await asyncio.gather(
                client.follow(http, cases[5].body(timeout=1), whole),
                client.follow(http, cases[5].body(timeout=1, stream=True), stream),
            )
            assert time.monotonic() - start < IN_TIME_S
            await first

    try:
        asyncio.run(story())
    finally:
        os.kill(decode, signal.SIGCONT)
    for outcome in (begun, whole, stream):
        check_overdue(outcome)
    assert (begun.status, whole.status, stream.status) == (200, 504, 504)
    client.assert_ledger_clean()
    for case, outcome in zip(cases, client.ask_all([case.body() for case in cases]), strict=True):
        case.check(outcome)
