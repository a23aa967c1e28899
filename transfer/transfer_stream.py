"""The node's transfer stream: copies of pages go behind an event, and their end wakes the node's loop.

Knows no page and no plane. On a CPU a copy is over when it is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from common.device.streams import Event, Stream, Streams
from common.device.watch import EventWatch

T = TypeVar("T")


class TransferStream:
    """What is launched here happens in order. Close it; owned by the node's loop, like all that uses it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._watch = EventWatch(streams.device, "transfer")

    def launch(self, work: Callable[[], T], after: Event) -> tuple[T, Event]:
        """Do work on the stream behind an event; returns its result, and the event of its end."""
        self._streams.wait(Stream.TRANSFER, after)
        with self._streams.transfer():
            result = work()
        end = self._streams.record(Stream.TRANSFER)
        self._watch.watch(end)
        return result, end

    def pollables(self) -> list[int]:
        """What to wait for: readable when something that was launched has ended."""
        return self._watch.pollables()

    def clear(self) -> None:
        """What has ended so far is looked at now."""
        self._watch.clear()

    def close(self) -> None:
        """Wait until all has ended."""
        self._watch.close()
