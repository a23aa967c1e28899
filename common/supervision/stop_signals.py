"""The signals that end a server, as bytes on a socket that a selector can wait for.

It must not know what ending means. Python's handlers would raise at any point of the program; a descriptor is
read where the loop is ready for it.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _leave_to_wakeup_fd(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the signal's number is already in the socket."""


class StopSignals:
    """Catches SIGINT, SIGTERM and SIGHUP between enter and exit; for the main thread, once a process."""

    def __init__(self) -> None:
        self._ours, self._pythons = socket.socketpair()
        self._ours.setblocking(False)
        self._pythons.setblocking(False)
        self._old_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        signal.set_wakeup_fd(self._pythons.fileno(), warn_on_full_buffer=False)
        for signum in STOP_SIGNALS:
            # `nohup baton serve` has SIGHUP ignored, and wants it so.
            if signum is signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            self._old_handlers[signum] = signal.signal(signum, _leave_to_wakeup_fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(-1)
        self._ours.close()
        self._pythons.close()

    def fileno(self) -> int:
        """Return the descriptor that is readable when a signal came."""
        return self._ours.fileno()

    def take(self) -> int | None:
        """Return the next stop signal that came, None if there is none: a second one says something else."""
        with contextlib.suppress(BlockingIOError):
            while signums := self._ours.recv(1):
                if signums[0] in STOP_SIGNALS:
                    return signums[0]
        return None
