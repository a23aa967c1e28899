"""Pairs of links over a wire that loses, delays, doubles and reorders, and processes that start again."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.clock import NUM_SAMPLES, PeerClock
from common.codec import Envelope
from common.link import (
    Deliver,
    Input,
    Link,
    LinkDown,
    LinkState,
    PeerGone,
    Received,
    StatusDue,
    Tick,
    Transmit,
)
from common.messages import Abort, Hello, HelloAck, Status
from tests.wire.hellos import DECODE, PREFILL
from tests.wire.wire import LossyWire

SIDES = st.integers(0, 1)
PLACES = st.integers(0, 1000)


def is_greeting(envelope: Envelope) -> bool:
    return isinstance(envelope.message, Hello | HelloAck)


@dataclass
class Process:
    """One end: side 0 connects, side 1 accepts. No two have the same clock."""

    side: int
    epoch: int
    link: Link = field(init=False)
    inbox: list[int] = field(default_factory=list)  # ids of the Aborts that were delivered on this link
    statuses: list[Status] = field(default_factory=list)
    num_sent: int = 0
    clock: PeerClock = field(default_factory=PeerClock)  # what it thinks of the other's
    # Of the last Statuses: how long the way there and back took (inf: nothing had gone there), and back.
    ways_s: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))

    @property
    def ahead_s(self) -> float:
        """Its clock, minus the wire's."""
        return 1000.0 * self.epoch

    def renew(self, now: float) -> None:
        self.link = Link((DECODE, PREFILL)[self.side], self.epoch, initiates=self.side == 0, now=now)
        self.inbox.clear()
        self.statuses.clear()
        self.num_sent = 0
        self.clock = PeerClock()
        self.ways_s.clear()


class LinksOverALossyWire(RuleBasedStateMachine):
    """What the owner of a link may rely on, whatever happens below it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next_id = 1
        self.next_epoch = 1
        self.sent_by: dict[int, int] = {}  # message id -> epoch of its sender
        self.wires = (LossyWire[Envelope](), LossyWire[Envelope]())  # wires[side] leads to that side
        self.ends = [self.new_process(0), self.new_process(1)]

    def new_process(self, side: int) -> Process:
        self.next_epoch += 1
        process = Process(side, self.next_epoch)
        process.renew(self.now)
        return process

    def transmit(self, end: Process, output: Transmit) -> None:
        end.num_sent += 1
        assert output.envelope.seq == end.num_sent
        envelope = output.envelope
        if isinstance(envelope.message, Status):
            stamped = end.clock.stamp(envelope.message, self.now + end.ahead_s)
            envelope = replace(envelope, message=stamped)
        self.wires[1 - end.side].send(envelope)

    def feed(self, side: int, input_: Input) -> None:
        end = self.ends[side]
        for output in end.link.handle(input_, self.now):
            match output:
                case Transmit():
                    self.transmit(end, output)
                case StatusDue():
                    self.transmit(end, end.link.send(Status(last_seq_seen=0, open_ids=()))[0])
                case Deliver(Abort(id=id_)):
                    end.inbox.append(id_)
                case Deliver(Status() as status):
                    end.statuses.append(status)
                    end.clock.hear(status, self.now + end.ahead_s)
                    self.note_ways(end, status)
                case LinkDown():
                    end.renew(self.now)
                    if isinstance(input_, Received):
                        self.feed(side, input_)  # the greeting of the new process, for the new link

    def note_ways(self, end: Process, status: Status) -> None:
        """What nobody could know who had not both clocks."""
        peer = self.ends[1 - end.side]
        back_s = self.now - (status.sent_s - peer.ahead_s)
        there_s = math.inf
        if status.echo_s is not None:
            there_s = (status.echo_came_s - peer.ahead_s) - (status.echo_s - end.ahead_s)
        end.ways_s.append((there_s + back_s, back_s))

    # What processes do ------------------------------------------------------------------------------------

    @rule(side=SIDES)
    def send(self, side: int) -> None:
        end = self.ends[side]
        if end.link.state is LinkState.UP:
            self.sent_by[self.next_id] = end.epoch
            self.transmit(end, end.link.send(Abort(self.next_id))[0])
            self.next_id += 1

    @rule(side=SIDES, seconds=st.sampled_from((0.1, 0.5, 1.0, 3.0)))
    def time_passes(self, side: int, seconds: float) -> None:
        self.now += seconds
        self.feed(side, Tick())

    @rule(side=SIDES)
    def start_again(self, side: int) -> None:
        """A process is replaced. What it sent may still arrive, but nobody greets in its name any more."""
        self.ends[side] = self.new_process(side)
        self.wires[1 - side].lose_if(is_greeting)
        self.wires[side].flying.clear()
        self.feed(1 - side, PeerGone("its process ended"))

    @initialize()
    def begin(self) -> None:
        self.greet()

    @rule()
    def greet(self) -> None:
        """Greetings overtake whatever else is under way, so that most runs have links that are up."""
        self.now += 1.0
        self.feed(0, Tick())
        for side in (1, 0):
            flying = self.wires[side].flying
            while (at := next((i for i, e in enumerate(flying) if is_greeting(e)), None)) is not None:
                self.feed(side, Received(self.wires[side].arrive(at)))

    # What the wire does -----------------------------------------------------------------------------------

    @precondition(lambda self: any(wire.flying for wire in self.wires))
    @rule(side=SIDES, at=PLACES, keep=st.booleans(), times=st.integers(1, 2))
    def arrive(self, side: int, at: int, keep: bool, times: int) -> None:
        if self.wires[side].flying:
            envelope = self.wires[side].arrive(at, keep=keep)
            for _ in range(times):
                self.feed(side, Received(envelope))

    @precondition(lambda self: any(wire.flying for wire in self.wires))
    @rule(side=SIDES, at=PLACES)
    def lose(self, side: int, at: int) -> None:
        if self.wires[side].flying:
            self.wires[side].lose(at)

    # What must hold ---------------------------------------------------------------------------------------

    @invariant()
    def delivered_in_order_and_once(self) -> None:
        for end in self.ends:
            assert end.inbox == sorted(set(end.inbox))

    @invariant()
    def nothing_of_a_process_that_is_gone_is_delivered(self) -> None:
        for end, peer in (self.ends, self.ends[::-1]):
            assert {self.sent_by[id_] for id_ in end.inbox} <= {peer.epoch}

    @invariant()
    def a_status_never_claims_what_was_not_sent(self) -> None:
        for end in self.ends:
            assert all(status.last_seq_seen <= end.num_sent for status in end.statuses)

    @invariant()
    def the_other_clock_is_known_within_half_of_the_shortest_way_there_and_back(self) -> None:
        for end, peer in (self.ends, self.ends[::-1]):
            if not end.ways_s:
                continue
            error_s = end.clock.offset_s - (end.ahead_s - peer.ahead_s)
            there_and_back_s = min(both for both, _ in end.ways_s)
            if math.isfinite(there_and_back_s):
                assert abs(error_s) <= there_and_back_s / 2 + 1e-6
            else:  # the other has not heard us yet: a Status came no earlier than it was sent
                assert abs(error_s - min(back for _, back in end.ways_s)) <= 1e-6

    def teardown(self) -> None:
        """The wire heals: both ends are up soon, talk, and hear a Status each second."""
        for wire in self.wires:
            wire.flying.clear()
        for _ in range(3):
            self.second_on_a_good_wire()
        assert [end.link.state for end in self.ends] == [LinkState.UP] * 2
        for end in self.ends:
            end.statuses.clear()
            self.send(end.side)
        newest = [self.next_id - 1, self.next_id - 2]
        for _ in range(5):
            self.second_on_a_good_wire()
        assert [end.inbox[-1] for end in self.ends] == newest
        assert [len(end.statuses) for end in self.ends] == [5, 5]
        ours, theirs = self.ends
        assert abs(ours.clock.offset_s - (ours.ahead_s - theirs.ahead_s)) <= 1e-6
        assert abs(theirs.clock.offset_s - (theirs.ahead_s - ours.ahead_s)) <= 1e-6

    def second_on_a_good_wire(self) -> None:
        self.now += 1.0
        for side in (0, 1):
            self.feed(side, Tick())
        while any(wire.flying for wire in self.wires):
            for side in (0, 1):
                if self.wires[side].flying:
                    self.feed(side, Received(self.wires[side].arrive(0)))


LinksOverALossyWire.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestLinksOverALossyWire = LinksOverALossyWire.TestCase
