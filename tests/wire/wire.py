"""A wire that loses, delays, doubles and reorders, and the order that a link makes of it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class LossyWire(Generic[T]):
    """Things under way in one direction; the test decides what becomes of each."""

    def __init__(self) -> None:
        self.flying: list[T] = []

    def send(self, thing: T) -> None:
        """Put something on the wire."""
        self.flying.append(thing)

    def arrive(self, at: int, *, keep: bool = False) -> T:
        """The `at`-th thing arrives; with `keep` it will arrive once more."""
        at %= len(self.flying)
        return self.flying[at] if keep else self.flying.pop(at)

    def lose(self, at: int) -> None:
        """The `at`-th thing never arrives."""
        self.flying.pop(at % len(self.flying))

    def lose_if(self, doomed: Callable[[T], bool]) -> None:
        """What fits never arrives."""
        self.flying = [thing for thing in self.flying if not doomed(thing)]


class LinkedWire(Generic[T]):
    """One direction of a link that is up, as its owner sees it: over a lossy wire, in order and once."""

    def __init__(self) -> None:
        self.wire: LossyWire[tuple[int, T]] = LossyWire()
        self.next_seq = 1
        self.last_seq_seen = 0

    def send(self, message: T) -> int:
        """Number a message and put it on the wire."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.wire.send((seq, message))
        return seq

    def arrive(self, at: int, *, keep: bool = False) -> T | None:
        """Something arrives; what was passed already counts no more."""
        seq, message = self.wire.arrive(at, keep=keep)
        if seq <= self.last_seq_seen:
            return None
        self.last_seq_seen = seq
        return message
