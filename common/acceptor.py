"""The side of links that binds: a ROUTER, with a session for each peer that greets.

Must not know who greets: which nodes they are and what they are for is their owner's matter.
"""

from __future__ import annotations

import time

import zmq

from common.clock import Clock
from common.codec import Envelope
from common.faulty_socket import socket_class
from common.link import Link, LinkState, PeerGone, Received, Tick, first_common_plane, mismatch
from common.messages import CODEC, Hello, HelloAck
from common.peer import ChoosePlane, Peer, PeerEvent, Session, StatusOf
from common.peering import Peering
from common.sockets import FrameSocket, Pollable, ReceivedFrames


class Acceptor(Peering):
    """The side that binds."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        local: Hello,
        epoch: int,
        status_of: StatusOf,
        choose: ChoosePlane = first_common_plane,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(local, epoch, status_of, None, clock)
        self._choose = choose
        self.socket = socket_class(FrameSocket).router(context, address)
        self._sessions: dict[bytes, Session] = {}
        self._answered_last = b""  # the connection of a process of another version

    @property
    def address(self) -> str:
        """What was bound."""
        return self.socket.address

    def peers(self) -> list[Peer]:
        """Peers that are up."""
        return [
            s.peer for s in self._sessions.values() if s.peer is not None and s.link.state is LinkState.UP
        ]

    def pidfds(self) -> dict[int, int]:
        """Descriptors that are readable when a peer's process has ended, with the peer's epoch."""
        return {
            s.pidfd: s.peer.epoch
            for s in self._sessions.values()
            if s.pidfd is not None and s.peer is not None
        }

    def pollables(self) -> list[Pollable]:
        """What to wait for."""
        return [*self.socket.pollables(), *self.pidfds()]

    def deadline(self) -> float | None:
        """When `poll` has something to do at the latest."""
        return min((d for s in self._sessions.values() if (d := s.link.deadline()) is not None), default=None)

    def poll(self, now: float, most: int | None = None) -> list[PeerEvent]:
        """Read all messages, or so many at the most; notice deaths, send what is due."""
        num_read = 0
        while num_read != most and (received := self.socket.receive()) is not None:
            self._take(received, now)
            num_read += 1
        if (reason := self.socket.refused()) is not None:
            self._refused(reason, decided_here=True)
        self._check_deaths(list(self._sessions.values()), now)
        for session in list(self._sessions.values()):
            self._feed(session, Tick(), now)
        self._check_deaths([], now)
        return self._take_events()

    def transmit(self, envelope: Envelope, identity: bytes) -> bool:
        """Put a message on the wire."""
        return self.socket.send(CODEC.encode(envelope), identity)

    def close(self) -> None:
        """Close everything; peers notice by themselves."""
        for session in self._sessions.values():
            session.close()
        self.socket.close()

    def _take(self, received: ReceivedFrames, now: float) -> None:
        envelope = self._decode(received)
        if envelope is None:
            return
        session = self._sessions.get(received.identity)
        # A stranger with a node's name is refused below, and must not cost the node its link.
        if isinstance(envelope.message, Hello) and self._refusal(self.local, envelope.message) is None:
            self._replace_older(received.identity, envelope, now)
            session = self._sessions.get(received.identity)
        if session is None:
            if not isinstance(envelope.message, Hello):
                self._disown(received.identity)
                return
            link = Link(
                self.local, self.epoch, initiates=False, now=now, check=self._refusal, choose=self._choose
            )
            session = self._sessions[received.identity] = Session(link, received.identity, self._post)
        self._feed(session, Received(envelope), now)
        if session.link.state is LinkState.REFUSED:
            del self._sessions[received.identity]  # it may greet again

    def _refusal(self, ours: Hello, theirs: Hello) -> str | None:
        """Why a peer is refused: it does not fit, or another process that may be alive has its name."""
        if (reason := mismatch(ours, theirs)) is not None:
            return reason
        for session in self._sessions.values():
            holder = None if session.peer is None else session.peer.hello
            if holder is None or holder.node_id != theirs.node_id or holder.host == theirs.host:
                continue
            if not session.process_is_gone():
                return (
                    f"node id {theirs.node_id} is taken by pid {holder.host.pid}, not pid {theirs.host.pid}"
                )
        return None

    def _replace_older(self, identity: bytes, envelope: Envelope, now: float) -> None:
        """A node that greets over a new connection, or as a new process, has no use for its older link."""
        for session in list(self._sessions.values()):
            peer = session.peer
            if peer is None or peer.node_id != envelope.message.node_id:
                continue
            if session.identity != identity or peer.epoch != envelope.epoch:
                self._feed(session, PeerGone("it connected anew"), now)

    def _met_other_version(self, identity: bytes, reason: str) -> None:
        """Answer, not each of its greetings: it cannot read the answer, but logs which version that is of."""
        if identity != self._answered_last:
            self._answered_last = identity
            self._refused(reason, decided_here=True)
            ack = HelloAck(self.local, accepted=False, reason=reason)
            self.transmit(Envelope(self.epoch, 0, ack), identity)

    def _disown(self, identity: bytes) -> None:
        """Tell a process whose link was replaced, and whose connection lives on, to greet anew."""
        self.counters["messages_before_greeting"] += 1
        ack = HelloAck(self.local, accepted=False, reason="another connection took its place")
        self.transmit(Envelope(self.epoch, 0, ack), identity)  # whoever is gone needs no answer

    def _lost(self, session: Session, now: float) -> None:
        self._sessions.pop(session.identity, None)
