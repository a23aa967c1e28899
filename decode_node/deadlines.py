"""Until when each request may take: which are overdue, and when the next one will be. Pure.

A heap. A request that ended is left in it and passed over when its time comes, or dropped when most of what
is in there has ended: with the default of an hour it would otherwise hold an hour's requests. Knows no phase
and no pages.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_ENDED = 64  # in the heap, beside as many as there are alive


class Deadlines(Generic[K]):
    """Deadlines by key."""

    def __init__(self) -> None:
        self._due_s: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()  # keys need no order of their own

    def set(self, key: K, due_s: float) -> None:
        """Give a key that has none its deadline."""
        self._due_s[key] = due_s
        heapq.heappush(self._heap, (due_s, next(self._order), key))

    def discard(self, key: K) -> None:
        """Forget a key, if it is here: it ended."""
        if self._due_s.pop(key, None) is not None and len(self._heap) > 2 * len(self._due_s) + MAX_ENDED:
            self._heap = [item for item in self._heap if self._is_alive(item)]
            heapq.heapify(self._heap)

    def next_s(self) -> float | None:
        """When the next one is overdue."""
        while self._heap and not self._is_alive(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_overdue(self, now: float) -> list[K]:
        """Take out those whose time has come, in its order."""
        overdue = []
        while (due_s := self.next_s()) is not None and due_s <= now:
            key = heapq.heappop(self._heap)[2]
            del self._due_s[key]
            overdue.append(key)
        return overdue

    def _is_alive(self, item: tuple[float, int, K]) -> bool:
        due_s, _, key = item
        return self._due_s.get(key) == due_s
