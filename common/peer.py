"""A process at the other end of a link: its name, its session, and the events that tell of it.

Knows what a link sends and who the peer is; must not know of sockets, or which side connected.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.clock import PeerClock
from common.codec import Envelope, Header
from common.host import has_ended, open_pidfd
from common.link import Link, LinkState
from common.messages import Hello, HostIdentity, Status


def new_epoch() -> int:
    """Draw the number that names this process on every link."""
    return secrets.randbits(62) | 1


@dataclass(eq=False, slots=True)
class Peer:
    """A process at the other end of a link that is, or was, up."""

    hello: Hello
    epoch: int
    plane: str
    session: Session = field(repr=False)

    @property
    def node_id(self) -> str:
        """The peer's name."""
        return self.hello.node_id

    @property
    def has_heard(self) -> bool:
        """It is known to have read all that it was sent, or is gone."""
        link = self.session.link
        return link.state is not LinkState.UP or link.is_heard

    @property
    def offset_s(self) -> float:
        """What is added to a time of the peer's to have it on our clock."""
        return self.session.clock.offset_s

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


class Session:
    """A link, the way to its peer, and the pidfd that tells of the peer's death.

    Args:
        link: decides what is sent.
        identity: the peer's on a ROUTER; empty where there is one peer.
        post: puts a message on the wire.
    """

    def __init__(self, link: Link, identity: bytes, post: Callable[[Session, Envelope], None]) -> None:
        self.link = link
        self.identity = identity
        self.peer: Peer | None = None
        self.pidfd: int | None = None
        self.clock = PeerClock()
        self._post = post

    def send(self, message: Any) -> int:
        """Send; returns the sequence number. On a link that is down it goes nowhere (0)."""
        if self.link.state is not LinkState.UP:
            return 0
        output, seq = self.link.send(message)
        self._post(self, output.envelope)
        return seq

    def watch(self, ours: HostIdentity, theirs: HostIdentity) -> None:
        """Have a peer on this host watched; for any other there is the connection."""
        with contextlib.suppress(OSError):
            self.pidfd = open_pidfd(ours, theirs)

    def process_is_gone(self) -> bool:
        """Say whether the peer is known to have ended."""
        return self.pidfd is not None and has_ended(self.pidfd)

    def close(self) -> None:
        """Watch no longer."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
