"""A free list with a reuse fence: what is given back while a step is in flight rests until it is processed.

A finished request still has a step in flight that writes its row and its last page. Handing either out
before that step's result is processed would let the step write into somebody else's. Steps are numbered and
processed in order, so a fence is the number of the last step that may still touch the ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from common.errors import InvariantError


class FencedFreeList:
    """Ids to hand out: free, or resting behind a fence."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._free = deque(ids)
        self._resting: deque[tuple[int, tuple[int, ...]]] = deque()  # (fence, ids), fences never fall
        self._passed = 0

    @property
    def num_free(self) -> int:
        """Ids that `take` can give."""
        return len(self._free)

    @property
    def num_resting(self) -> int:
        """Ids behind a fence."""
        return sum(len(ids) for _, ids in self._resting)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take `count` ids, or None when there are fewer."""
        if count > len(self._free):
            return None
        return tuple(self._free.popleft() for _ in range(count))

    def give_back(self, ids: Iterable[int], fence: int = 0) -> None:
        """Give ids back; they are free once `pass_fence` has reached `fence`."""
        if fence <= self._passed:
            self._free.extend(ids)
            return
        if self._resting and fence < self._resting[-1][0]:
            raise InvariantError(f"fence {fence} after {self._resting[-1][0]}")
        self._resting.append((fence, tuple(ids)))

    def pass_fence(self, fence: int) -> None:
        """Step `fence` was processed: nothing up to it touches anything any more."""
        self._passed = max(self._passed, fence)
        while self._resting and self._resting[0][0] <= self._passed:
            self._free.extend(self._resting.popleft()[1])


class StepFence:
    """Counts a node's steps as they are launched and processed, in order."""

    def __init__(self) -> None:
        self._launched = 0
        self._processed = 0

    @property
    def current(self) -> int:
        """The fence for what is given up now: the last step in flight, or 0 when none is."""
        return self._launched if self._launched > self._processed else 0

    def launch(self) -> int:
        """Number the next step."""
        self._launched += 1
        return self._launched

    def process(self, step_id: int) -> None:
        """The result of a step is processed from now on.

        Raises:
            InvariantError: it is not the next one.
        """
        if step_id != self._processed + 1:
            raise InvariantError(f"step {step_id} processed after step {self._processed}")
        self._processed = step_id
