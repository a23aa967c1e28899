"""When a supervised process is started again, and when it is killed first: a machine with a given clock.

It must not know processes, signals or sockets: the supervisor tells it what happened and asks what is due.

    STARTING --ready--> READY --died--> DOWN --due: START--> STARTING
        |                 |
        |               due: STALLED (no sign of life for the stall timeout)
      due: SLOW           v
        +------------> CONDEMNED --died--> DOWN, or given up if it was never ready
"""

from __future__ import annotations

from enum import Enum

MAX_DELAY_S = 10.0
CALM_S = 10.0  # ready for so long: the next death is the first again
STARTUP_S = 1800.0  # no sign of life: a slow disk takes minutes, kernels built on few cores ten


class Phase(Enum):
    """Where a supervised process stands."""

    STARTING = "starting"
    READY = "ready"
    CONDEMNED = "condemned"  # to be killed; its end has not been seen yet
    DOWN = "down"  # waiting for its next start


class Due(Enum):
    """What the supervisor has to do now."""

    START = "start"
    KILL_STALLED = "stalled"
    KILL_SLOW = "slow"


class RestartPolicy:
    """The life of one process: at once after its first death, then 1, 2, 4, 8, 10, 10, ... seconds later.

    All times are seconds of one monotonic clock.
    """

    def __init__(self, stall_timeout_s: float, startup_timeout_s: float = STARTUP_S) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._startup_timeout_s = startup_timeout_s
        self.phase = Phase.DOWN
        self.was_ever_ready = False
        self._deaths_in_a_row = 0
        self._ready_since_s: float | None = None
        self._deadline_s: float | None = 0.0

    def started(self, now: float) -> None:
        """Note that a process was started."""
        self.phase = Phase.STARTING
        self._ready_since_s = None
        self._deadline_s = now + self._startup_timeout_s

    def ready(self, now: float) -> None:
        """Note that the process said it is ready."""
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY
            self.was_ever_ready = True
            self._ready_since_s = now
            self._deadline_s = now + self._stall_timeout_s

    def alive(self, now: float) -> None:
        """Note a sign of life."""
        if self.phase is Phase.READY:
            self._deadline_s = now + self._stall_timeout_s

    def died(self, now: float) -> float | None:
        """Note that the process ended; return the seconds until its next start, None if it gets none."""
        if not self.was_ever_ready:
            self._deadline_s = None
            self.phase = Phase.CONDEMNED
            return None
        if self._ready_since_s is not None and now - self._ready_since_s >= CALM_S:
            self._deaths_in_a_row = 0
        delay_s = 0.0
        if self._deaths_in_a_row:
            # The exponent is bounded: a process that dies for weeks must not overflow a float.
            delay_s = min(MAX_DELAY_S, 2.0 ** min(self._deaths_in_a_row - 1, 10))
        self._deaths_in_a_row += 1
        self.phase = Phase.DOWN
        self._ready_since_s = None
        self._deadline_s = now + delay_s
        return delay_s

    def deadline(self) -> float | None:
        """Say when `due` has to be asked at the latest."""
        return self._deadline_s

    def due(self, now: float) -> Due | None:
        """Say what has to be done now; it is said once, and taken as done."""
        if self._deadline_s is None or now < self._deadline_s:
            return None
        self._deadline_s = None
        match self.phase:
            case Phase.DOWN:
                return Due.START
            case Phase.READY:
                self.phase = Phase.CONDEMNED
                return Due.KILL_STALLED
            case Phase.STARTING:
                self.phase = Phase.CONDEMNED
                return Due.KILL_SLOW
            case Phase.CONDEMNED:
                return None
