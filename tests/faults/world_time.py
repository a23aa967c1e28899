"""An asyncio loop whose clock is the test's: it never waits, and a timer is due when the test says so."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Sized
from typing import Any

ROUNDS = 10  # what goes on for longer goes on the next time


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what is ready, one round at a time.

    Args:
        clock: seconds, in the place of the system's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._selecting = selectors.EpollSelector()
        self._clock = clock
        super().__init__(self._selecting)

    def time(self) -> float:
        """Seconds of the test's clock."""
        return self._clock()

    def fileno(self) -> int:
        """A descriptor that is readable while a round would find something."""
        return self._selecting.fileno()

    def round(self) -> bool:
        """Run what is ready now, and what that makes ready, without waiting; False when nothing was."""
        private: Any = self
        ready: Sized = private._ready
        deadline_s = self.deadline()
        is_due = deadline_s is not None and deadline_s <= self._clock()
        if not (ready or is_due or self._selecting.select(0)):
            return False
        for _ in range(ROUNDS):
            self.call_soon(self.stop)
            self.run_forever()
            if not ready:
                break
        return True

    def deadline(self) -> float | None:
        """When the next timer is due."""
        private: Any = self
        timers: list[asyncio.TimerHandle] = private._scheduled
        return min((timer.when() for timer in timers if not timer.cancelled()), default=None)
