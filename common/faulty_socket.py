"""A message socket with faults in it: stands in for FrameSocket where faults are asked for.

What is sent is lost, doubled, late, or goes behind the next message. A message that is late by itself
(`delay`, `reorder`) gets its number when it leaves, as if it had been said then: a link would drop an older
number. One that is stalled keeps its own, and all behind it wait, as in TCP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

from common import faults
from common.codec import Buffer
from common.messages import Chunk, Credit, Peers, Stats, StatsRequest, Status
from common.sockets import FrameSocket, Placer, Pollable, ReceivedFrames

ACTIONS = ("drop", "double", "delay", "reorder", "stall")
# Said at any time, whatever a request does: nothing changes places with these.
_BACKGROUND = {kind.__name__ for kind in (Status, Stats, StatsRequest, Peers, Credit)}


@dataclass(eq=False, slots=True)
class _Way:
    """What is held of the messages to one peer."""

    shift: int = 0  # of the numbers, because of what was taken out
    last_seq: int = 0
    late: list[tuple[faults.Hold, list[Buffer]]] = field(default_factory=list)
    overtaken: list[list[Buffer]] = field(default_factory=list)
    stalled: deque[tuple[faults.Hold | None, list[Buffer]]] = field(default_factory=deque)


class FaultySocket(FrameSocket):
    """See above."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> None:
        active = faults.active()
        assert active is not None
        self._faults = active
        self._ways: dict[bytes, _Way] = {}
        self._layers = 1  # of the pages in a Chunk
        super().__init__(context, kind, address)

    def pollables(self) -> tuple[Pollable, ...]:
        """Of the socket, and what says that something held may go on."""
        return (*super().pollables(), self._faults.wake_fd)

    def receive(self, place: Placer | None = None) -> ReceivedFrames | None:
        """Receive; the loop calls it in every turn, so what is due goes now."""
        self._faults.woken()
        for identity, way in self._ways.items():
            self._go_on(identity, way)
        return super().receive(place)

    def send(self, frames: Sequence[Buffer], identity: bytes = b"") -> bool:
        """Send, unless a rule says otherwise; False when the peer is gone."""
        header = msgpack.unpackb(frames[0])
        kind, seq = header["kind"], header["seq"]
        if seq == 1:  # a new link
            self._ways.pop(identity, None)
        way = self._ways.setdefault(identity, _Way())
        parts = list(frames)
        hello = header["fields"].get("hello", header["fields"])
        if layout := hello.get("layout"):
            self._layers = layout["layers"]
        if kind == Chunk.__name__ and len(parts) > 1:
            parts = _spoil(self._faults, header, parts, self._layers)
        rule = self._faults.find(kind, *ACTIONS)
        match None if rule is None else rule.action:
            case "drop":
                return True
            case "delay" if rule is not None:
                way.late.append((faults.Hold(rule, self._faults), parts))
                way.shift -= 1
                return True
            case "reorder":
                way.overtaken.append(parts)
                way.shift -= 1
                return True
            case "stall" if rule is not None:
                return self._pass(identity, way, parts, header, faults.Hold(rule, self._faults))
        sent = self._pass(identity, way, parts, header)
        if rule is not None:  # double
            self._pass(identity, way, list(parts), header)
        if way.overtaken and kind not in _BACKGROUND:
            self._say_now(identity, way, way.overtaken)
        return sent

    def _go_on(self, identity: bytes, way: _Way) -> None:
        due = [item for item in way.late if item[0].is_over()]
        way.late = [item for item in way.late if item not in due]
        self._say_now(identity, way, [parts for _, parts in due])
        while way.stalled and (way.stalled[0][0] is None or way.stalled[0][0].is_over()):
            super().send(way.stalled.popleft()[1], identity)

    def _say_now(self, identity: bytes, way: _Way, held: list[list[Buffer]]) -> None:
        for parts in held:
            way.shift += 1
            header = msgpack.unpackb(parts[0])
            self._pass(identity, way, parts, header | {"seq": way.last_seq + 1 - way.shift})
        if held is way.overtaken:
            way.overtaken = []

    def _pass(
        self,
        identity: bytes,
        way: _Way,
        parts: list[Buffer],
        header: dict[str, Any],
        hold: faults.Hold | None = None,
    ) -> bool:
        """Give a message its number; it goes, or waits, where it or one before it is stalled."""
        way.last_seq = header["seq"] + way.shift
        parts[0] = msgpack.packb(header | {"seq": way.last_seq})
        if hold is None and not way.stalled:
            return super().send(parts, identity)
        way.stalled.append((hold, parts))
        return True


def _spoil(active: faults.Faults, header: dict[str, Any], parts: list[Buffer], layers: int) -> list[Buffer]:
    """Flip a byte of a page or let two change places, in the frames of a Chunk: [layers, pages, bytes]."""
    num_pages = header["fields"]["num_pages"]
    wrong = [page for page in range(num_pages) if active.find("page", "corrupt") is not None]
    swapped = num_pages > 1 and active.find("pages", "swap") is not None
    if not wrong and not swapped:
        return parts
    data = bytearray().join(parts[1:])
    size = len(data) // layers // num_pages
    for page in wrong:
        data[page * size + 3] ^= 0x40  # not the last bit: it would not be seen in the tokens
    for at in range(0, len(data) if swapped else 0, num_pages * size):
        first, second = slice(at, at + size), slice(at + size, at + 2 * size)
        data[first], data[second] = data[second], data[first]
    cut, at = parts[:1], 0
    for part in parts[1:]:
        end = at + memoryview(part).nbytes
        cut.append(bytes(data[at:end]))
        at = end
    return cut


def socket_class(real: type[FrameSocket]) -> type[FrameSocket]:
    """Choose what a link's socket is."""
    return real if faults.active() is None else FaultySocket
