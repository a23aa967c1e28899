"""When a process that was told to end leaves: at once, or once it has finished what it has. Pure.

It must not know what there is to finish. SIGTERM asks for it (systemd, Kubernetes, `kill`); SIGINT is
somebody who waits at a terminal, and a second signal somebody who has waited enough.
"""

from __future__ import annotations

import signal
from collections.abc import Callable


class Drain:
    """One process's way out.

    Args:
        grace_s: how long what is there may take; 0: nothing is waited for.
        is_supervised: SIGTERM may come twice, from systemd to all processes of the service and then from the
            supervisor: only SIGINT hurries.
    """

    def __init__(self, grace_s: float, *, is_supervised: bool = False) -> None:
        self.grace_s = grace_s
        self._is_supervised = is_supervised
        self.deadline_s: float | None = None  # None: nobody asked yet
        self._at_once = False

    def told(self, signum: int, now: float) -> bool:
        """Take a signal; True when draining begins with it."""
        if signum == signal.SIGTERM and self.deadline_s is None and self.grace_s > 0:
            self.deadline_s = now + self.grace_s
            return True
        if signum != signal.SIGTERM or self.deadline_s is None or not self._is_supervised:
            self._at_once = True
        return False

    def is_over(self, now: float, is_done: Callable[[], bool]) -> bool:
        """Say whether to leave now; `is_done` is asked while draining alone."""
        if self._at_once or self.deadline_s is None:
            return self._at_once
        return now >= self.deadline_s or is_done()
