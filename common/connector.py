"""The side of a link that connects: a DEALER, replaced by a new one whenever the peer is gone.

Must not know what the peer is for: that is its owner's matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import zmq

from common.clock import Clock
from common.codec import Envelope
from common.faulty_socket import socket_class
from common.link import Link, LinkState, PeerGone, Received, Tick, mismatch
from common.messages import CODEC, Hello
from common.peer import Peer, PeerEvent, PlacePayload, Session, StatusOf
from common.peering import Peering
from common.sockets import FrameSocket, Pollable

REPLACE_AFTER_S = 60.0
REFUSED_RETRY_S = 1.0


class Connector(Peering):
    """The side that connects, to one address."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        local: Hello,
        epoch: int,
        status_of: StatusOf,
        *,
        now: float,
        place: PlacePayload | None = None,
        check: Callable[[Hello, Hello], str | None] = mismatch,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(local, epoch, status_of, place, clock)
        self._context = context
        self._check = check
        self._target = address
        self._retry_s: float | None = None  # when the next attempt is due, after a handshake failed
        self._num_refusals = 0  # since the link was up
        self._start(now)

    @property
    def peer(self) -> Peer | None:
        """The peer, when it is up."""
        return self._session.peer if self._session.link.state is LinkState.UP else None

    def pollables(self) -> list[Pollable]:
        """What to wait for."""
        pidfd = self._session.pidfd
        return [*self.socket.pollables(), *([] if pidfd is None else [pidfd])]

    def deadline(self) -> float | None:
        """When `poll` has something to do at the latest."""
        deadlines = (self._session.link.deadline(), self._retry_s)
        return min((d for d in deadlines if d is not None), default=None)

    def poll(self, now: float) -> list[PeerEvent]:
        """Read all messages, notice death, send what is due."""
        session = self._session
        while (received := self.socket.receive(self._placer)) is not None:
            envelope = self._decode(received)
            if envelope is not None:
                self._feed(session, Received(envelope), now)
            if session is not self._session:  # the socket was replaced: the rest is of the old process
                break
        if session is self._session and (reason := self.socket.refused()) is not None:
            self._num_refusals += 1
            if self._num_refusals > 1:  # the first may be the last that a dying process did
                self._refused(reason, decided_here=False)  # whoever binds decides
            self._retry_s = now + REFUSED_RETRY_S
        if self._retry_s is not None:
            if now >= self._retry_s:
                self._lost(self._session, now)
        elif session is self._session and self.socket.lost_connection():
            self._feed(session, PeerGone("the connection broke"), now)
        self._check_deaths([self._session], now)
        if self._session.peer is None and now - self._started_s > REPLACE_AFTER_S:
            self._lost(self._session, now)  # nobody is there: drop the greetings that it has queued
        self._feed(self._session, Tick(), now)
        return self._take_events()

    def transmit(self, envelope: Envelope, identity: bytes) -> bool:
        """Put a message on the wire."""
        # While a refused connection waits for the next attempt there is nobody to greet, and nobody to miss.
        return self._retry_s is not None or self.socket.send(CODEC.encode(envelope))

    def close(self) -> None:
        """Close everything; the peer notices by itself."""
        self._session.close()
        self.socket.close()

    def _placer(self, identity: bytes, first: bytes) -> Sequence[memoryview] | None:
        return self._place_for(self._session, first)

    def _start(self, now: float) -> None:
        self.socket = socket_class(FrameSocket).dealer(self._context, self._target)
        self._started_s = now
        self._retry_s = None
        link = Link(self.local, self.epoch, initiates=True, now=now, check=self._check)
        self._session = Session(link, b"", self._post)

    def _lost(self, session: Session, now: float) -> None:
        # A DEALER hands what it has queued to the next process at the address: a new one has nothing queued.
        self.socket.close()
        if session.peer is not None:
            self._num_refusals = 0
        self._start(now)
