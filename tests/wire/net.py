"""Links over real sockets in one process; what happened to each end, on the test's own clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from common.acceptor import Acceptor
from common.connector import Connector
from common.messages import Hello, Status
from common.peer import Peer, PeerDown, PeerEvent, PeerMessage, PeerUp
from tests.wire.hellos import DECODE, PREFILL
from tests.wire.loop import until

Context = zmq.Context[zmq.Socket[bytes]]
D_EPOCH, P_EPOCH = 101, 202


def no_status(peer: Peer) -> Status:
    """A Status with nothing open."""
    return Status(last_seq_seen=0, open_ids=())


class Net:
    """Acceptors and connectors in one process, and all that happened to them. Time is the test's."""

    def __init__(self, context: Context, address: str) -> None:
        self.context = context
        self.target = address
        self.now = 0.0
        self.events: dict[Any, list[PeerEvent]] = {}

    def acceptor(self, local: Hello = PREFILL, epoch: int = P_EPOCH, ahead_s: float = 0.0) -> Acceptor:
        """One more that binds; its clock is ahead of the test's."""
        clock = self._clock(ahead_s)
        acceptor = Acceptor(self.context, self.target, local, epoch, no_status, clock=clock)
        self.events[acceptor] = []
        return acceptor

    def connector(self, local: Hello = DECODE, epoch: int = D_EPOCH, ahead_s: float = 0.0) -> Connector:
        """One more that connects; its clock is ahead of the test's."""
        clock = self._clock(ahead_s)
        connector = Connector(self.context, self.target, local, epoch, no_status, now=self.now, clock=clock)
        self.events[connector] = []
        return connector

    def _clock(self, ahead_s: float) -> Callable[[], float]:
        return lambda: self.now + ahead_s

    def drop(self, end: Acceptor | Connector) -> None:
        """Close one end."""
        self.events.pop(end)
        end.close()

    def close(self) -> None:
        """Close all."""
        for end in list(self.events):
            self.drop(end)

    def until(self, condition: Callable[[], bool]) -> None:
        """Let all work until it is so."""

        def turn() -> bool:
            for end, events in self.events.items():
                events.extend(end.poll(self.now))
            return condition()

        until(turn, lambda: [item for end in self.events for item in end.pollables()])

    def happened(self, end: Any, kind: type[PeerEvent]) -> list[Any]:
        """Events of one kind at one end."""
        return [event for event in self.events[end] if isinstance(event, kind)]

    def messages(self, end: Any) -> list[Any]:
        """What was delivered there, Statuses aside."""
        got = [event.message for event in self.happened(end, PeerMessage)]
        return [message for message in got if not isinstance(message, Status)]

    def until_up(self, *ends: Any, times: int = 1) -> None:
        """All these ends have come up so often."""
        self.until(lambda: all(len(self.happened(end, PeerUp)) == times for end in ends))

    def until_down(self, end: Any) -> None:
        """The clock goes on: a closed connection is noticed when a Status cannot be sent."""

        def noticed() -> bool:
            self.now += 1.0
            return bool(self.happened(end, PeerDown))

        self.until(noticed)

    def peer(self, end: Any) -> Peer:
        """The peer that came up last."""
        up = self.happened(end, PeerUp)[-1]
        assert isinstance(up.peer, Peer)
        return up.peer
