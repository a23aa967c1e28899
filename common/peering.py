"""Perform what links decide: what the side that binds and the side that connects share.

    Acceptor   a ROUTER; a link for each peer that greets (gateway: nodes; P: decode nodes)
    Connector  a DEALER; one link, its socket replaced whenever the peer is gone (node: gateway; D: a P)

Both give the same events. Bytes that are no message are counted, logged and survived. The owner's loop
calls `poll` when something of `pollables()` is readable, and at `deadline()` at the latest. The sockets are
the two sides' own; what a node does with an event is not known here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from common.clock import Clock, PeerClock
from common.codec import Envelope
from common.errors import OtherVersion, RemoteProtocolError
from common.link import Deliver, Discard, Input, LinkDown, LinkRefused, LinkUp, PeerGone, StatusDue, Transmit
from common.messages import CODEC, Hello, Status
from common.peer import Peer, PeerDown, PeerEvent, PeerMessage, PeerUp, PlacePayload, Session, StatusOf
from common.sockets import ReceivedFrames

log = logging.getLogger("baton.link")

MAX_REFUSALS = 100  # reasons that are remembered as said


class Peering:
    """What both sides share: decoding, performing a link's outputs, death.

    `clock`: of what the owner stamps. `poll` may be given an earlier time, that of the owner's turn.
    """

    def __init__(
        self, local: Hello, epoch: int, status_of: StatusOf, place: PlacePayload | None, clock: Clock
    ) -> None:
        self.local = local
        self.epoch = epoch
        self.counters: Counter[str] = Counter()
        self._status_of = status_of
        self._place = place
        self._clock = clock
        self._events: list[PeerEvent] = []
        self._refusals: set[str] = set()
        self._unreachable: list[Session] = []

    # For subclasses ---------------------------------------------------------------------------------------

    def transmit(self, envelope: Envelope, identity: bytes) -> bool:
        """Put a message on the wire; False when there is no way to the peer."""
        raise NotImplementedError

    def _lost(self, session: Session, now: float) -> None:
        """A session's link went down; forget it, or start again."""
        raise NotImplementedError

    def _met_other_version(self, identity: bytes, reason: str) -> None:
        """A process of another version spoke; that was logged."""

    # Shared -----------------------------------------------------------------------------------------------

    def _feed(self, session: Session, input_: Input, now: float) -> None:
        for output in session.link.handle(input_, now):
            match output:
                case Transmit(envelope):
                    self._post(session, envelope)
                case LinkUp(hello, epoch, plane):
                    session.peer = Peer(hello, epoch, plane, session)
                    session.clock = PeerClock(is_ours=hello.host.boot_id == self.local.host.boot_id)
                    self._events.append(PeerUp(session.peer))
                    session.watch(self.local.host, hello.host)
                case LinkRefused(reason, decided_here):
                    self._refused(reason, decided_here=decided_here)
                case LinkDown(reason):
                    self._down(session, reason, now)
                case Deliver(message):
                    assert session.peer is not None
                    if isinstance(message, Status):
                        session.clock.hear(message, self._clock())
                    self._events.append(PeerMessage(session.peer, message))
                case StatusDue():
                    assert session.peer is not None
                    session.send(self._status_of(session.peer))
                case Discard(why):
                    self.counters[why] += 1

    def _post(self, session: Session, envelope: Envelope) -> None:
        if isinstance(envelope.message, Status):
            envelope = replace(envelope, message=session.clock.stamp(envelope.message, self._clock()))
        if not self.transmit(envelope, session.identity):
            self._unreachable.append(session)

    def _down(self, session: Session, reason: str, now: float) -> None:
        session.close()
        if session.peer is not None:
            log.info("%s: link to %s is down: %s", self.local.node_id, session.peer.node_id, reason)
            self._events.append(PeerDown(session.peer, reason))
        self._lost(session, now)

    def _refused(self, reason: str, *, decided_here: bool) -> None:
        self.counters["links_refused"] += 1
        if reason not in self._refusals:  # it is tried again and again; said once
            if len(self._refusals) >= MAX_REFUSALS:
                self._refusals.clear()
            self._refusals.add(reason)
            self.counters["peers_refused"] += decided_here
            log.error("%s: link refused: %s", self.local.node_id, reason)

    def _decode(self, received: ReceivedFrames) -> Envelope | None:
        try:
            if not received.complete:
                raise RemoteProtocolError("a payload frame has the wrong size")
            return CODEC.decode(received.frames)
        except RemoteProtocolError as error:
            self.counters["messages_rejected"] += 1
            count = self.counters["messages_rejected"]
            if count & (count - 1) == 0:  # 1, 2, 4, 8, ...: a flood must not fill the disk
                log.warning("%s: rejected message no. %d: %s", self.local.node_id, count, error)
            if isinstance(error, OtherVersion):
                self._met_other_version(received.identity, str(error))
            else:
                self.counters["messages_malformed"] += 1
            return None

    def _place_for(self, session: Session | None, first: bytes) -> Sequence[memoryview] | None:
        if self._place is None or session is None or session.peer is None:
            return None
        try:
            return self._place(session.peer, CODEC.decode_header(first))
        except RemoteProtocolError:
            return None  # decoded and counted once the whole message is here

    def _check_deaths(self, sessions: Sequence[Session], now: float) -> None:
        for session in sessions:
            if session.process_is_gone():
                self._feed(session, PeerGone("its process ended"), now)
        while self._unreachable:
            self._feed(self._unreachable.pop(), PeerGone("it cannot be reached"), now)

    def _take_events(self) -> list[PeerEvent]:
        events, self._events = self._events, []
        return events
