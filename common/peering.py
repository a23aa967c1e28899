"""Perform what links decide: sockets, epochs, pidfds. One class for the side that binds, one that connects.

    Acceptor   a ROUTER; a link for each peer that greets (gateway: nodes; P: decode nodes)
    Connector  a DEALER; one link, its socket replaced whenever the peer is gone (node: gateway; D: a P)

Both give the same events. Bytes that are no message are counted, logged and survived. The owner's loop
calls `poll` when something of `pollables()` is readable, and at `deadline()` at the latest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from common.codec import Envelope, Header
from common.errors import RemoteProtocolError
from common.host import has_ended, open_pidfd
from common.link import (
    Deliver,
    Discard,
    Input,
    Link,
    LinkDown,
    LinkRefused,
    LinkState,
    LinkUp,
    PeerGone,
    Received,
    StatusDue,
    Tick,
    Transmit,
    first_common_plane,
    mismatch,
)
from common.messages import CODEC, Hello, HelloAck, Status
from common.sockets import FrameSocket, Pollable, ReceivedFrames

log = logging.getLogger("baton.link")

LINK_COUNTERS = (
    "links_refused",
    "messages_rejected",  # no message, or not one for this link
    "messages_lost",  # gaps in the sequence
    "messages_duplicate",
    "messages_of_another_epoch",
    "messages_before_greeting",
    "greetings_repeated",
    "greetings_misplaced",
)
MAX_REFUSALS = 100  # reasons that are remembered as said
REPLACE_AFTER_S = 60.0


def new_epoch() -> int:
    """Draw the number that names this process on every link."""
    return secrets.randbits(62) | 1


@dataclass(eq=False, slots=True)
class Peer:
    """A process at the other end of a link that is, or was, up."""

    hello: Hello
    epoch: int
    plane: str
    session: _Session = field(repr=False)

    @property
    def node_id(self) -> str:
        """The peer's name."""
        return self.hello.node_id

    def send(self, message: Any) -> int:
        """Send; returns the sequence number. To a peer that is down it goes nowhere (0)."""
        return self.session.send(message)


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A peer greeted and fits."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerDown:
    """A peer's process or connection is gone; everything of its epoch is over."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """A message of a peer that is up, in order."""

    peer: Peer
    message: Any


PeerEvent = PeerUp | PeerDown | PeerMessage
# Chooses where the payload frames of a message go (`Chunk`), or None for fresh memory.
PlacePayload = Callable[[Peer, Header], Sequence[memoryview] | None]
StatusOf = Callable[[Peer], Status]
ChoosePlane = Callable[[Hello, Hello], str]  # of us and of the peer


class _Session:
    """A link, the way to its peer, and the pidfd that tells of the peer's death."""

    def __init__(self, owner: _Peering, link: Link, identity: bytes) -> None:
        self.owner = owner
        self.link = link
        self.identity = identity
        self.peer: Peer | None = None
        self.pidfd: int | None = None

    def send(self, message: Any) -> int:
        if self.link.state is not LinkState.UP:
            return 0
        output, seq = self.link.send(message)
        if not self.owner.transmit(output.envelope, self.identity):
            self.owner.unreachable.append(self)
        return seq

    def watch(self, hello: Hello) -> None:
        """Have a peer on this host watched; for any other there is the connection."""
        with contextlib.suppress(OSError):
            self.pidfd = open_pidfd(self.owner.local.host, hello.host)

    def process_is_gone(self) -> bool:
        """Say whether the peer is known to have ended."""
        return self.pidfd is not None and has_ended(self.pidfd)

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class _Peering:
    """What both sides share: decoding, performing a link's outputs, death."""

    def __init__(
        self, local: Hello, epoch: int, status_of: StatusOf, place: PlacePayload | None = None
    ) -> None:
        self.local = local
        self.epoch = epoch
        self.counters: Counter[str] = Counter(dict.fromkeys(LINK_COUNTERS, 0))
        self.unreachable: list[_Session] = []
        self._status_of = status_of
        self._place = place
        self._events: list[PeerEvent] = []
        self._refusals: set[str] = set()

    # For subclasses ---------------------------------------------------------------------------------------

    def transmit(self, envelope: Envelope, identity: bytes) -> bool:
        raise NotImplementedError

    def _lost(self, session: _Session, now: float) -> None:
        """A session's link went down; forget it, or start again."""
        raise NotImplementedError

    # Shared -----------------------------------------------------------------------------------------------

    def _feed(self, session: _Session, input_: Input, now: float) -> None:
        for output in session.link.handle(input_, now):
            match output:
                case Transmit(envelope):
                    if not self.transmit(envelope, session.identity):
                        self.unreachable.append(session)
                case LinkUp(hello, epoch, plane):
                    session.peer = Peer(hello, epoch, plane, session)
                    self._events.append(PeerUp(session.peer))
                    session.watch(hello)
                case LinkRefused(reason):
                    self._refused(reason)
                case LinkDown(reason):
                    self._down(session, reason, now)
                case Deliver(message):
                    assert session.peer is not None
                    self._events.append(PeerMessage(session.peer, message))
                case StatusDue():
                    assert session.peer is not None
                    session.send(self._status_of(session.peer))
                case Discard(why):
                    self.counters[why] += 1

    def _down(self, session: _Session, reason: str, now: float) -> None:
        session.close()
        if session.peer is not None:
            log.info("%s: link to %s is down: %s", self.local.node_id, session.peer.node_id, reason)
            self._events.append(PeerDown(session.peer, reason))
        self._lost(session, now)

    def _refused(self, reason: str) -> None:
        self.counters["links_refused"] += 1
        if reason not in self._refusals:  # it is tried again and again; said once
            if len(self._refusals) >= MAX_REFUSALS:
                self._refusals.clear()
            self._refusals.add(reason)
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
            return None

    def _place_for(self, session: _Session | None, first: bytes) -> Sequence[memoryview] | None:
        if self._place is None or session is None or session.peer is None:
            return None
        try:
            return self._place(session.peer, CODEC.decode_header(first))
        except RemoteProtocolError:
            return None  # decoded and counted once the whole message is here

    def _check_deaths(self, sessions: Sequence[_Session], now: float) -> None:
        for session in sessions:
            if session.process_is_gone():
                self._feed(session, PeerGone("its process ended"), now)
        while self.unreachable:
            self._feed(self.unreachable.pop(), PeerGone("it cannot be reached"), now)

    def _take_events(self) -> list[PeerEvent]:
        events, self._events = self._events, []
        return events


class Acceptor(_Peering):
    """The side that binds."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        local: Hello,
        epoch: int,
        status_of: StatusOf,
        choose: ChoosePlane = first_common_plane,
    ) -> None:
        super().__init__(local, epoch, status_of)
        self._choose = choose
        self.socket = FrameSocket.router(context, address)
        self._sessions: dict[bytes, _Session] = {}

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

    def poll(self, now: float) -> list[PeerEvent]:
        """Read all messages, notice deaths, send what is due."""
        while (received := self.socket.receive()) is not None:
            self._take(received, now)
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
            session = self._sessions[received.identity] = _Session(self, link, received.identity)
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

    def _disown(self, identity: bytes) -> None:
        """Tell a process whose link was replaced, and whose connection lives on, to greet anew."""
        self.counters["messages_before_greeting"] += 1
        ack = HelloAck(self.local, accepted=False, reason="another connection took its place")
        self.transmit(Envelope(self.epoch, 0, ack), identity)  # whoever is gone needs no answer

    def _lost(self, session: _Session, now: float) -> None:
        self._sessions.pop(session.identity, None)


class Connector(_Peering):
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
    ) -> None:
        super().__init__(local, epoch, status_of, place)
        self._context = context
        self._check = check
        self._target = address
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
        return self._session.link.deadline()

    def poll(self, now: float) -> list[PeerEvent]:
        """Read all messages, notice death, send what is due."""
        session = self._session
        while (received := self.socket.receive(self._placer)) is not None:
            envelope = self._decode(received)
            if envelope is not None:
                self._feed(session, Received(envelope), now)
            if session is not self._session:  # the socket was replaced: the rest is of the old process
                break
        if session is self._session and self.socket.lost_connection():
            self._feed(session, PeerGone("the connection broke"), now)
        self._check_deaths([self._session], now)
        if self._session.peer is None and now - self._started_s > REPLACE_AFTER_S:
            self._lost(self._session, now)  # nobody is there: drop the greetings that it has queued
        self._feed(self._session, Tick(), now)
        return self._take_events()

    def transmit(self, envelope: Envelope, identity: bytes) -> bool:
        """Put a message on the wire."""
        return self.socket.send(CODEC.encode(envelope))

    def close(self) -> None:
        """Close everything; the peer notices by itself."""
        self._session.close()
        self.socket.close()

    def _placer(self, identity: bytes, first: bytes) -> Sequence[memoryview] | None:
        return self._place_for(self._session, first)

    def _start(self, now: float) -> None:
        self.socket = FrameSocket.dealer(self._context, self._target)
        self._started_s = now
        link = Link(self.local, self.epoch, initiates=True, now=now, check=self._check)
        self._session = _Session(self, link, b"")

    def _lost(self, session: _Session, now: float) -> None:
        # A DEALER hands what it has queued to the next process at the address: a new one has nothing queued.
        self.socket.close()
        self._start(now)
