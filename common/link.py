"""The machine of one peer pair: greeting, epochs, order, Status, death. All links run it.

Pure: no clock (`now` is passed in), no socket, no thread, no logging. `peering.py` performs its outputs.

1. The initiator (who connected) sends Hello until a HelloAck comes; the acceptor answers every Hello.
   Each checks the other; a mismatch refuses the peer and leaves the process alone. A refusal that comes
   while the link is up says that the acceptor dropped it: the initiator's end goes down too.
2. A message counts only if it carries the epoch that the peer greeted with: bytes of a process that is gone
   are dropped.
3. Sequence numbers rise by one a message. What arrives is delivered in order: a number that was seen, or
   passed, is dropped as a duplicate. So above the link there is loss, but no disorder and no doubles.
4. Status goes out once a second; its `last_seq_seen` is filled in here. Missing Statuses are no death:
   death is `PeerGone` (a pidfd, a broken connection), or a Hello with another epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from common.codec import Envelope
from common.errors import LocalProtocolError
from common.messages import Hello, HelloAck, Role, Stats, Status

HELLO_RETRY_S = 1.0
REFUSED_RETRY_S = 10.0
STATUS_EVERY_S = 1.0


class LinkState(Enum):
    """Where the greeting stands."""

    GREETING = auto()
    UP = auto()
    REFUSED = auto()
    DOWN = auto()


class LinkEvent(Enum):
    """What can happen to a link, after the message was looked at."""

    GREETED = auto()  # a Hello or HelloAck that both sides accept
    MISMATCH = auto()  # one that somebody refuses
    NEW_EPOCH = auto()  # a Hello of another process
    DISOWNED = auto()  # the acceptor says that it has no link with us
    MESSAGE = auto()  # anything else
    RETRY = auto()  # time to greet again
    GONE = auto()  # the peer's process or connection is gone


S, E = LinkState, LinkEvent
# The whole life of a link. A missing key is our own error: what a peer can cause has a row.
TRANSITIONS: dict[tuple[LinkState, LinkEvent], LinkState] = {
    (S.GREETING, E.GREETED): S.UP,
    (S.GREETING, E.MISMATCH): S.REFUSED,
    (S.GREETING, E.NEW_EPOCH): S.DOWN,
    (S.GREETING, E.MESSAGE): S.GREETING,  # its HelloAck was lost; this message is lost with it
    (S.GREETING, E.RETRY): S.GREETING,
    (S.GREETING, E.GONE): S.DOWN,
    (S.UP, E.GREETED): S.UP,  # our HelloAck was lost, or doubled
    (S.UP, E.MISMATCH): S.UP,  # an old answer that came late
    (S.UP, E.NEW_EPOCH): S.DOWN,
    (S.UP, E.DISOWNED): S.DOWN,
    (S.UP, E.MESSAGE): S.UP,
    (S.UP, E.GONE): S.DOWN,
    (S.REFUSED, E.GREETED): S.UP,
    (S.REFUSED, E.MISMATCH): S.REFUSED,
    (S.REFUSED, E.NEW_EPOCH): S.DOWN,
    (S.REFUSED, E.MESSAGE): S.REFUSED,
    (S.REFUSED, E.RETRY): S.GREETING,
    (S.REFUSED, E.GONE): S.DOWN,
    (S.DOWN, E.GREETED): S.DOWN,
    (S.DOWN, E.MISMATCH): S.DOWN,
    (S.DOWN, E.NEW_EPOCH): S.DOWN,
    (S.DOWN, E.MESSAGE): S.DOWN,
    (S.DOWN, E.GONE): S.DOWN,
}


# Inputs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A decoded message came in."""

    envelope: Envelope


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The peer's process or connection is known to be gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; do what is due."""


# Outputs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transmit:
    """Put this on the wire."""

    envelope: Envelope


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The peer is known and fits."""

    hello: Hello
    epoch: int
    plane: str


@dataclass(frozen=True, slots=True)
class LinkRefused:
    """The peer does not fit, or says that we don't."""

    reason: str
    decided_here: bool = True


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The peer is gone; everything of its epoch is over."""

    reason: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """A message for the owner of the link, in order."""

    message: Any


@dataclass(frozen=True, slots=True)
class StatusDue:
    """The owner should `send` a Status."""


@dataclass(frozen=True, slots=True)
class Discard:
    """A message was dropped; `why` is the name of a counter."""

    why: str


Input = Received | PeerGone | Tick
Output = Transmit | LinkUp | LinkRefused | LinkDown | Deliver | StatusDue | Discard


LINKED_ROLES = (
    {Role.GATEWAY, Role.PREFILL},
    {Role.GATEWAY, Role.DECODE},
    {Role.PREFILL, Role.DECODE},
)


def mismatch(ours: Hello, theirs: Hello) -> str | None:
    """Say why two processes cannot work together, with both values named; None when they can."""
    if {ours.role, theirs.role} not in LINKED_ROLES:
        return f"a {ours.role.value} node at {ours.node_id}, a {theirs.role.value} node at {theirs.node_id}"
    if ours.model != theirs.model:
        return (
            f"model {ours.model[:12]} at {ours.node_id}, {theirs.model[:12]} at {theirs.node_id}: "
            "start both with the same MODEL"
        )
    if ours.layout is None or theirs.layout is None:
        return None
    for name in ("page_size", "dtype", "layers", "kv_heads", "head_dim"):
        mine, other = getattr(ours.layout, name), getattr(theirs.layout, name)
        if mine != other:
            return f"{name} {mine} at {ours.node_id}, {other} at {theirs.node_id}: give both the same options"
    if ours.verify_pages != theirs.verify_pages:
        with_, without = (ours, theirs) if ours.verify_pages else (theirs, ours)
        return f"--verify-pages at {with_.node_id}, not at {without.node_id}: give it to both"
    if not set(ours.planes) & set(theirs.planes):
        return f"planes {list(ours.planes)} at {ours.node_id}, {list(theirs.planes)} at {theirs.node_id}"
    return None


def first_common_plane(ours: Hello, theirs: Hello) -> str:
    """Choose the first of our planes that the peer has too; none between a node and its gateway."""
    return next((name for name in ours.planes if name in theirs.planes), "")


class Link:
    """One end of a link.

    Args:
        local: what we say about ourselves.
        epoch: of our process.
        initiates: True for the side that connected.
        now: seconds of any clock that the owner goes on using.
        check: says why a peer is refused, or None; `mismatch` unless a test says otherwise.
        choose: picks the plane of a peer that fits, for the acceptor; "" when none works.
    """

    def __init__(
        self,
        local: Hello,
        epoch: int,
        *,
        initiates: bool,
        now: float,
        check: Callable[[Hello, Hello], str | None] = mismatch,
        choose: Callable[[Hello, Hello], str] = first_common_plane,
    ) -> None:
        self._local = local
        self._epoch = epoch
        self._initiates = initiates
        self._check = check
        self._choose = choose
        self._plane = ""
        self._next_seq = 1
        self._peer_epoch: int | None = None
        self._last_seq_seen = 0
        self._last_news_seq = 0
        self._peer_has_seen = 0
        self._status_due_s = now
        self._greet_due_s = now
        self.state = LinkState.GREETING

    def deadline(self) -> float | None:
        """When `Tick` has something to do, or None."""
        match self.state:
            case LinkState.UP:
                return self._status_due_s
            case LinkState.GREETING | LinkState.REFUSED:
                return self._greet_due_s if self._initiates else None
            case LinkState.DOWN:
                return None

    @property
    def is_heard(self) -> bool:
        """The peer has said, by a Status, that it read all that was sent; what we say once a second aside."""
        return self._peer_has_seen >= self._last_news_seq

    def send(self, message: Any) -> tuple[Transmit, int]:
        """Number a message; returns it and its sequence number.

        Raises:
            LocalProtocolError: the link is not up.
        """
        if self.state is not LinkState.UP:
            raise LocalProtocolError(f"send on a link that is {self.state.name}")
        if isinstance(message, Status):
            message = replace(message, last_seq_seen=self._last_seq_seen)
        elif not isinstance(message, Stats):
            self._last_news_seq = self._next_seq
        return self._transmit(message), self._next_seq - 1

    def handle(self, input_: Input, now: float) -> tuple[Output, ...]:
        """Take one input; return what is to be done, in this order."""
        match input_:
            case Received(envelope):
                return self._received(envelope, now)
            case PeerGone(reason):
                return self._go_down(LinkEvent.GONE, reason)
            case Tick():
                return self._tick(now)

    # ------------------------------------------------------------------------------------------------------

    def _transmit(self, message: Any) -> Transmit:
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        return Transmit(Envelope(self._epoch, seq, message))

    def _step(self, event: LinkEvent) -> LinkState:
        before = self.state
        after = TRANSITIONS.get((before, event))
        if after is None:
            raise LocalProtocolError(f"{event.name} while {before.name}")
        self.state = after
        return before

    def _go_down(self, event: LinkEvent, reason: str) -> tuple[Output, ...]:
        return (LinkDown(reason),) if self._step(event) is not LinkState.DOWN else ()

    def _tick(self, now: float) -> tuple[Output, ...]:
        if self.state is LinkState.UP:
            if now < self._status_due_s:
                return ()
            self._status_due_s = now + STATUS_EVERY_S
            return (StatusDue(),)
        due = self.deadline()
        if due is None or now < due:
            return ()
        self._step(LinkEvent.RETRY)
        self._greet_due_s = now + HELLO_RETRY_S
        return (self._transmit(self._local),)

    def _received(self, envelope: Envelope, now: float) -> tuple[Output, ...]:
        message = envelope.message
        if isinstance(message, Hello) and not self._initiates:
            return self._greeted_by(envelope, message, now)
        if isinstance(message, HelloAck) and self._initiates:
            return self._answered_by(envelope, message, now)
        if isinstance(message, Hello | HelloAck):
            return (Discard("greetings_misplaced"),)
        before = self._step(LinkEvent.MESSAGE)
        if before is not LinkState.UP:
            return (Discard("messages_before_greeting"),)
        if envelope.epoch != self._peer_epoch:
            return (Discard("messages_of_another_epoch"),)
        if envelope.seq <= self._last_seq_seen:
            return (Discard("messages_duplicate"),)
        if isinstance(message, Status):
            self._peer_has_seen = message.last_seq_seen
        lost = envelope.seq - self._last_seq_seen - 1
        self._last_seq_seen = envelope.seq
        return (Discard("messages_lost"),) * min(lost, 1) + (Deliver(message),)

    def _greeted_by(self, envelope: Envelope, hello: Hello, now: float) -> tuple[Output, ...]:
        """Acceptor: answer a Hello, the first or a repeated one."""
        if self._peer_epoch is not None and envelope.epoch != self._peer_epoch:
            return self._go_down(LinkEvent.NEW_EPOCH, f"{hello.node_id} started again")
        if self.state is LinkState.DOWN:
            return (Discard("greetings_misplaced"),)
        reason = self._check(self._local, hello)
        if reason is None and self.state is not LinkState.UP:
            self._plane = self._choose(self._local, hello)
            if not self._plane and self._local.layout is not None and hello.layout is not None:
                reason = f"no data plane works between {self._local.node_id} and {hello.node_id}"
        before = self._step(LinkEvent.GREETED if reason is None else LinkEvent.MISMATCH)
        answer = self._transmit(HelloAck(self._local, reason is None, reason or "", self._plane))
        if reason is not None:
            return (answer, LinkRefused(reason))
        if before is LinkState.UP:
            self._last_seq_seen = max(self._last_seq_seen, envelope.seq)
            return (answer,)
        self._up(envelope, now)
        return (answer, LinkUp(hello, envelope.epoch, self._plane))

    def _answered_by(self, envelope: Envelope, ack: HelloAck, now: float) -> tuple[Output, ...]:
        """Initiator: take the answer to our Hello."""
        if self._peer_epoch is not None and envelope.epoch != self._peer_epoch:
            return self._go_down(LinkEvent.NEW_EPOCH, f"{ack.hello.node_id} started again")
        if self.state is LinkState.UP and not ack.accepted:
            return self._go_down(LinkEvent.DISOWNED, ack.reason)
        if self.state is LinkState.UP:  # the answer to an earlier Hello: nothing new, and not lost either
            self._step(LinkEvent.GREETED)
            self._last_seq_seen = max(self._last_seq_seen, envelope.seq)
            return (Discard("greetings_repeated"),)
        if self.state is LinkState.DOWN:
            return (Discard("greetings_misplaced"),)
        reason = self._check(self._local, ack.hello) if ack.accepted else ack.reason
        if reason is None and ack.plane not in ("", *self._local.planes):
            reason = f"{ack.hello.node_id} chose the plane {ack.plane}, which was not offered"
        self._step(LinkEvent.GREETED if reason is None else LinkEvent.MISMATCH)
        if reason is not None:
            self._greet_due_s = now + REFUSED_RETRY_S
            return (LinkRefused(reason, decided_here=ack.accepted),)
        self._up(envelope, now)
        return (LinkUp(ack.hello, envelope.epoch, ack.plane),)

    def _up(self, envelope: Envelope, now: float) -> None:
        self._peer_epoch = envelope.epoch
        self._last_seq_seen = max(self._last_seq_seen, envelope.seq)
        self._status_due_s = now
