"""Transfer streams on which copies go on after they are launched, as on a GPU, without one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from common.device.streams import Event, Streams
from transfer.transfer_stream import T, TransferStream

ASKED_PER_COPY = 3


class _End(Event):
    """The end of a copy, when the stream says so."""

    def __init__(self) -> None:
        super().__init__()
        self.happened = threading.Event()

    def is_done(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        self.happened.wait()


class _AskedEnd(_End):
    """The end of a copy that goes on when it is asked for."""

    def __init__(self, go_on: Callable[[], None]) -> None:
        super().__init__()
        self._go_on = go_on

    def is_done(self) -> bool:
        self._go_on()
        return super().is_done()

    def synchronize(self) -> None:
        while not self.is_done():
            pass


class LaggingStream(TransferStream):
    """Copies end in order, one each third time that somebody asks for one; their bytes move at once."""

    def __init__(self) -> None:
        super().__init__(Streams(torch.device("cpu")))
        self._ends: deque[_AskedEnd] = deque()
        self._times_asked = 0

    def launch(self, work: Callable[[], T], after: Event) -> tuple[T, Event]:
        self._ends.append(_AskedEnd(self._go_on))
        return work(), self._ends[-1]

    def _go_on(self) -> None:
        self._times_asked += 1
        if self._ends and self._times_asked % ASKED_PER_COPY == 0:
            self._ends.popleft().happened.set()


class HeldStream(TransferStream):
    """Writes are done when the test says so, and not before: a late one spoils what is then in the page."""

    def __init__(self) -> None:
        super().__init__(Streams(torch.device("cpu")))
        self._held: deque[tuple[Callable[[], object], _End]] = deque()

    def launch(self, work: Callable[[], T], after: Event) -> tuple[T, Event]:
        end = _End()
        self._held.append((work, end))
        return None, end  # type: ignore[return-value]  # a write has no result

    def let_go(self) -> None:
        """Do all that was launched."""
        while self._held:
            work, end = self._held.popleft()
            work()
            end.happened.set()
