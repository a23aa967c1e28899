"""How far another process's clock is from ours, found out as NTP does it. Pure: the time is passed in.

A `Status` says when it was sent, and when the last one of whoever reads it was sent and came. So of two of
them four times are known: t1 and t4 of our clock, t2 and t3 of the peer's (RFC 5905, section 8).

    ours    t1 ─────┐              ┌────► t4     offset = ((t1 - t2) + (t4 - t3)) / 2
    peer's          └────► t2  t3 ─┘             round trip = (t4 - t1) - (t3 - t2)

The error is half of what one way took longer than the other, so half the round trip at the most: of the last
few, that with the smallest counts. Before the peer has heard us, a Status tells the least that its clock is
behind by. Processes of one host have one clock, CLOCK_MONOTONIC: there is nothing to find out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf

from common.messages import Status

Clock = Callable[[], float]  # seconds, as time.monotonic
NUM_SAMPLES = 8  # as NTP's clock filter: seconds, in which clocks drift apart by less than a millisecond


class PeerClock:
    """What is known of a peer's clock. What the peer says may be anything: then nothing but this is wrong."""

    def __init__(self, *, is_ours: bool = False) -> None:
        self.offset_s = 0.0  # to be added to a time of the peer's
        self._is_ours = is_ours
        self._samples: deque[tuple[float, float]] = deque(maxlen=NUM_SAMPLES)  # round trip, offset
        self._heard: tuple[float | None, float] = None, 0.0

    def stamp(self, status: Status, now: float) -> Status:
        """Write into a Status for the peer what it needs for its own estimate."""
        return replace(status, sent_s=now, echo_s=self._heard[0], echo_came_s=self._heard[1])

    def hear(self, status: Status, now: float) -> None:
        """Learn from a Status of the peer."""
        self._heard = status.sent_s, now
        if self._is_ours:
            return
        round_trip_s, offset_s = inf, now - status.sent_s
        if status.echo_s is not None:
            round_trip_s = (now - status.echo_s) - (status.sent_s - status.echo_came_s)
            offset_s = ((status.echo_s - status.echo_came_s) + offset_s) / 2
        self._samples.append((round_trip_s, offset_s))
        self.offset_s = min(self._samples)[1]
