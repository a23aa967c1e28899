"""The wire between two nodes, with a fault in it: a message is lost, comes twice, or comes late.

A line sits between a DEALER and a ROUTER of the nodes, which know nothing of it. It counts what passes, by
route (who says it to whom) and kind. Time is its owner's.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, ClassVar

import zmq

from common.codec import Buffer, Envelope
from common.messages import CODEC
from common.sockets import FrameSocket, Pollable, ReceivedFrames

DELAY_S = 2.0
Route = tuple[str, str]  # from, to: "gateway", "decode", "prefill"
Way = tuple[str, str]  # the address of a ROUTER, and "up" to it or "down" from it
ARRIVAL_MS = 100  # what has not come by then was for a socket that is closed


class CountedSocket(FrameSocket):
    """A socket that counts what is under way, so that a world in one thread knows when all has arrived."""

    under_way: ClassVar[Counter[Way]] = Counter()

    def send(self, frames: Sequence[Buffer], identity: bytes = b"") -> bool:
        """Send, and count."""
        sent = super().send(frames, identity)
        self.under_way[self.address, "down" if self._is_router else "up"] += sent
        return sent

    def receive(self, place: Any = None) -> ReceivedFrames | None:
        """Receive, and count."""
        received = super().receive(place)
        key = self.address, "up" if self._is_router else "down"
        if received is not None and self.under_way[key] > 0:
            self.under_way[key] -= 1
        return received

    def close(self) -> None:
        """What was under way here is gone."""
        for way in ("up", "down"):
            self.under_way.pop((getattr(self, "address", ""), way), None)
        super().close()


def is_readable(pollables: Sequence[Pollable], timeout_ms: int = 0) -> bool:
    """Say whether one of them is readable."""
    poller = zmq.Poller()
    for item in pollables:
        poller.register(item, zmq.POLLIN)
    return bool(poller.poll(timeout_ms))


def await_arrival(ways: Sequence[Way], pollables: Sequence[Pollable]) -> bool:
    """Wait for what is under way; False when nothing is. Real sockets take a moment, and the clock none."""
    under_way = CountedSocket.under_way
    if not any(under_way[way] > 0 for way in ways):
        return False
    if is_readable(pollables, ARRIVAL_MS):
        return True
    for way in ways:
        del under_way[way]
    return False


class Fault(Enum):
    """What becomes of a message."""

    LOST = auto()
    DOUBLED = auto()
    STALLED = auto()  # it comes 2 s late, and so does all behind it: what TCP does
    OVERTAKEN = auto()  # it alone comes 2 s late
    HELD = auto()  # it waits for `release`, and is numbered anew: as if it had been said then


@dataclass(eq=False, slots=True)
class Rule:
    """What becomes of the `nth` message of a kind on a route, counted from when the rule is there."""

    route: Route
    kind: str
    fault: Fault
    nth: int = 1
    seen: int = 0
    fired: int = 0
    held: list[Envelope] = field(default_factory=list)

    def applies(self, route: Route, message: Any) -> bool:
        """Count a message; say whether it is one of those."""
        if route != self.route or type(message).__name__ != self.kind:
            return False
        self.seen += 1
        self.fired += self.seen == self.nth
        return self.seen == self.nth


@dataclass(eq=False, slots=True)
class _Way:
    """One direction of a line."""

    route: Route
    waiting: list[tuple[float, int, Envelope]] = field(default_factory=list)  # a heap: due, order
    stalled_until_s: float = 0.0
    shift: int = 0  # of sequence numbers, while a message is held
    last_seq: int = 0


class Line:
    """Listens at `front` for the DEALER of `dealer`, and connects to the ROUTER of `router` at `back`."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], dealer: str, router: str, front: str, back: str
    ) -> None:
        self._context = context
        self._front = CountedSocket.router(context, front)
        self._back: FrameSocket | None = None
        self._identity = b""
        self._up, self._down = _Way((dealer, router)), _Way((router, dealer))
        self._order = 0
        self.rules: list[Rule] = []
        self.edit: Callable[[Any], Any] = lambda message: message  # done to every message
        self.passed: Counter[tuple[Route, str]] = Counter()
        self.front_address, self.back_address = self._front.address, back
        self._is_cut = False

    @property
    def ways_in(self) -> list[Way]:
        """On which something may be under way to here."""
        return [(self.front_address, "up"), (self.back_address, "down")]

    @property
    def routes(self) -> tuple[Route, Route]:
        """Both ways."""
        return self._up.route, self._down.route

    def pollables(self) -> list[Pollable]:
        """What to wait for."""
        if self._is_cut:
            return []
        ends = (self._front, self._back)
        return [end.pollables()[0] for end in ends if end is not None]

    def deadline(self) -> float | None:
        """When the next message that waits is due."""
        return min((way.waiting[0][0] for way in (self._up, self._down) if way.waiting), default=None)

    def pump(self, now: float) -> bool:
        """Take what came and pass on what is due; True when something moved."""
        moved = False
        if self._is_cut:
            return moved
        while (received := self._front.receive()) is not None:
            moved = True
            if received.identity != self._identity or self._back is None:  # it connected anew
                self._connect(received.identity)
            self._take(self._up, CODEC.decode(received.frames), now)
        while self._back is not None and (received := self._back.receive()) is not None:
            moved = True
            self._take(self._down, CODEC.decode(received.frames), now)
        for way in (self._up, self._down):
            while way.waiting and way.waiting[0][0] <= now:
                moved = True
                self._pass(way, heapq.heappop(way.waiting)[2])
        return moved

    def release(self, rule: Rule) -> None:
        """Let what a rule held go on, behind all that was passed on meanwhile."""
        way = self._up if rule.route == self._up.route else self._down
        for envelope in rule.held:
            way.shift += 1
            self._pass(way, replace(envelope, seq=way.last_seq + 1))
        rule.held.clear()

    def cut(self) -> None:
        """Break the connection for good, as the death of either end does."""
        self._is_cut = True
        for way in (self._up, self._down):
            way.waiting.clear()
        self._close()

    def close(self) -> None:
        """Close both ends."""
        if not self._is_cut:
            self._close()

    def _close(self) -> None:
        self._front.close()
        if self._back is not None:
            self._back.close()

    def _connect(self, identity: bytes) -> None:
        if self._back is not None:
            self._back.close()
        self._back = CountedSocket.dealer(self._context, self.back_address)
        self._identity = identity
        for way in (self._up, self._down):
            way.waiting.clear()
            way.shift = way.last_seq = 0

    def _take(self, way: _Way, envelope: Envelope, now: float) -> None:
        envelope = replace(envelope, seq=envelope.seq + way.shift, message=self.edit(envelope.message))
        rule = next((rule for rule in self.rules if rule.applies(way.route, envelope.message)), None)
        copies, due_s = 1, now
        match None if rule is None else rule.fault:
            case Fault.LOST:
                copies = 0
            case Fault.DOUBLED:
                copies = 2
            case Fault.STALLED:
                way.stalled_until_s = now + DELAY_S
            case Fault.OVERTAKEN:
                due_s = now + DELAY_S
            case Fault.HELD:
                assert rule is not None
                rule.held.append(envelope)
                way.shift -= 1
                copies = 0
        for _ in range(copies):
            self._order += 1
            heapq.heappush(way.waiting, (max(due_s, way.stalled_until_s), self._order, envelope))

    def _pass(self, way: _Way, envelope: Envelope) -> None:
        way.last_seq = max(way.last_seq, envelope.seq)
        self.passed[way.route, type(envelope.message).__name__] += 1
        frames = CODEC.encode(envelope)
        if way is self._down:
            self._front.send(frames, self._identity)
        elif self._back is not None:
            self._back.send(frames)
