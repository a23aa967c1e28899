"""How far another clock is: two simulated clocks and a wire with jitter; then real links and endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import NUM_SAMPLES, PeerClock
from common.messages import HostIdentity, Status
from common.peer import PeerMessage
from common.request import MAX_CHUNK_STAMPS, MOST_S, PrefillStamps
from tests.wire.endpoint_world import STAMPS, World
from tests.wire.hellos import DECODE, PREFILL
from tests.wire.net import Context, Net
from transfer.receiver_endpoint import TransferDone

EMPTY = Status(last_seq_seen=0, open_ids=())
EXACT_S = 1e-6
DELAYS = st.floats(0.0, 0.3)


@pytest.fixture
def net(context: Context, address: str) -> Iterator[Net]:
    with closing(Net(context, address)) as net:
        yield net


# Two clocks -------------------------------------------------------------------------------------------------


@given(
    ahead_s=st.floats(-1e6, 1e6),
    least_s=st.tuples(DELAYS, DELAYS),  # of the two ways: they need not be the same
    jitter_s=st.lists(st.tuples(DELAYS, DELAYS), min_size=2, max_size=2 * NUM_SAMPLES),
    lost=st.sets(st.integers(0, 2 * NUM_SAMPLES)),  # of the peer's
)
def test_the_error_is_at_most_half_the_shortest_way_there_and_back(
    ahead_s: float,
    least_s: tuple[float, float],
    jitter_s: list[tuple[float, float]],
    lost: set[int],
) -> None:
    ours, peers = PeerClock(), PeerClock()
    ways_s: list[float] = []
    for i, (there_s, back_s) in enumerate(jitter_s):
        now, there_s, back_s = 10.0 + i, there_s + least_s[0], back_s + least_s[1]
        peers.hear(ours.stamp(EMPTY, now), now + there_s + ahead_s)
        answered_s = now + there_s + 0.125
        status = peers.stamp(EMPTY, answered_s + ahead_s)
        if i not in lost:
            ours.hear(status, answered_s + back_s)
            ways_s.append(there_s + back_s)
    if ways_s:
        assert abs(ours.offset_s - -ahead_s) <= min(ways_s[-NUM_SAMPLES:]) / 2 + EXACT_S


def test_two_ways_that_take_the_same_time_give_the_clock_itself() -> None:
    ours, peers = PeerClock(), PeerClock()
    peers.hear(ours.stamp(EMPTY, 10.0), 510.25)
    ours.hear(peers.stamp(EMPTY, 511.0), 11.25)
    assert ours.offset_s == -500.0


def test_before_the_peer_has_heard_us_a_status_is_taken_to_come_at_once() -> None:
    clock = PeerClock()
    assert clock.offset_s == 0.0
    clock.hear(replace(EMPTY, sent_s=500.0), 10.5)
    clock.hear(replace(EMPTY, sent_s=501.0), 11.25)
    clock.hear(replace(EMPTY, sent_s=502.0), 12.75)
    assert clock.offset_s == -489.75  # the one that took the least time


def test_a_clock_that_drifts_is_followed() -> None:
    ours, peers = PeerClock(), PeerClock()
    for second in range(100):
        ahead_s = 500.0 + second * 100e-6
        peers.hear(ours.stamp(EMPTY, second), second + 0.001 + ahead_s)
        ours.hear(peers.stamp(EMPTY, second + 0.001 + ahead_s), second + 0.002)
    assert abs(ours.offset_s - -ahead_s) < NUM_SAMPLES * 100e-6 + 0.001


ANY_S = st.floats(-MOST_S, MOST_S)


@given(sent_s=ANY_S, echo_s=st.none() | ANY_S, echo_came_s=ANY_S)
def test_nonsense_is_survived_and_forgotten(sent_s: float, echo_s: float | None, echo_came_s: float) -> None:
    ours, peers = PeerClock(), PeerClock()
    ours.hear(replace(EMPTY, sent_s=sent_s, echo_s=echo_s, echo_came_s=echo_came_s), 1.0)
    assert abs(PrefillStamps(MOST_S, (-MOST_S,)).shifted(ours.offset_s).start_s) <= MOST_S
    for second in range(2, 3 + NUM_SAMPLES):
        peers.hear(ours.stamp(EMPTY, second), second + 500.0)
        ours.hear(peers.stamp(EMPTY, second + 500.0), second)
    assert ours.offset_s == -500.0


# Stamps -----------------------------------------------------------------------------------------------------


def test_stamps_are_moved_as_they_are_and_stay_within_what_can_be_said() -> None:
    stamps = PrefillStamps(10.0, (11.0, 12.5), 13.0)
    assert stamps.shifted(-2.0) == PrefillStamps(8.0, (9.0, 10.5), 11.0)
    assert PrefillStamps(10.0, (11.0,)).shifted(1.0) == PrefillStamps(11.0, (12.0,))
    assert stamps.shifted(3 * MOST_S) == PrefillStamps(MOST_S, (MOST_S, MOST_S), MOST_S)


def test_of_very_many_chunks_the_last_is_told() -> None:
    stamps = PrefillStamps(0.0)
    for number in range(1, MAX_CHUNK_STAMPS + 11):
        stamps = stamps.with_chunk(float(number))
    assert len(stamps.chunks_s) == MAX_CHUNK_STAMPS
    assert stamps.chunks_s[:2] == (1.0, 2.0)
    assert stamps.chunks_s[-2:] == (MAX_CHUNK_STAMPS - 1, MAX_CHUNK_STAMPS + 10)


# Links ------------------------------------------------------------------------------------------------------


def heard(net: Net, *ends: object, times: int) -> bool:
    """So many Statuses came at each."""
    return all(len(net.happened(end, PeerMessage)) >= times for end in ends)


def test_links_know_the_other_clock(net: Net) -> None:
    p, d = net.acceptor(ahead_s=1000.0), net.connector(ahead_s=-500.0)
    net.until_up(p, d)
    for second in (1.0, 2.0):
        net.now = second
        net.until(lambda second=second: heard(net, p, d, times=int(second) + 1))  # type: ignore[misc]
    assert abs(net.peer(d).offset_s - -1500.0) < EXACT_S
    assert abs(net.peer(p).offset_s - 1500.0) < EXACT_S


def test_a_peer_that_starts_again_has_another_clock(net: Net) -> None:
    p, first = net.acceptor(), net.connector(ahead_s=-500.0)
    net.until_up(p, first)
    net.until(lambda: heard(net, p, times=1))
    assert abs(net.peer(p).offset_s - 500.0) < EXACT_S
    net.drop(first)
    second = net.connector(epoch=7, ahead_s=30.0)
    net.until_up(second)
    net.until(lambda: net.peer(p).epoch == 7 and heard(net, p, times=2))
    assert abs(net.peer(p).offset_s - -30.0) < EXACT_S


def test_processes_of_one_host_have_one_clock(net: Net) -> None:
    host = HostIdentity("one host", 1, 1, 1)
    p = net.acceptor(replace(PREFILL, host=host), ahead_s=1000.0)  # whatever they say
    d = net.connector(replace(DECODE, host=replace(host, pid_namespace=2)))
    net.until_up(p, d)
    net.until(lambda: heard(net, p, d, times=1))
    assert (net.peer(p).offset_s, net.peer(d).offset_s) == (0.0, 0.0)


# Endpoints --------------------------------------------------------------------------------------------------


TURN_S = 0.25  # of the endpoints' world, where a Status takes no more than that


@pytest.mark.parametrize("p_ahead_s", [0.0, 1000.0, -1000.0])
def test_d_has_the_stamps_of_p_on_its_own_clock(context: Context, address: str, p_ahead_s: float) -> None:
    with closing(World(context, address, p_ahead_s=p_ahead_s)) as world:
        world.until(lambda: world.now > 3.0, step_s=TURN_S)  # Statuses
        world.hand_over([7], [3])
        (done,) = world.at_d
        assert isinstance(done, TransferDone)
        stamps = done.commit.stamps
        expected = replace(STAMPS, committed_s=world.now + p_ahead_s).shifted(-p_ahead_s)
        assert stamps.start_s == pytest.approx(expected.start_s, abs=TURN_S)
        assert stamps.chunks_s == pytest.approx(expected.chunks_s, abs=TURN_S)
        assert stamps.committed_s == pytest.approx(expected.committed_s, abs=TURN_S)
