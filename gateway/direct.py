"""Writes pieces of a response's body past ASGI: no coroutine, no event, and once a connection and round.

A round is one turn of the event loop. What it brings for a connection goes out with one system call, which
costs as much as all that was done for a token before: so a gateway that lags behind its nodes catches up.
Knows uvicorn's cycle, and nothing of what is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class WriteRound:
    """The connections that have something to be written at the end of this round."""

    def __init__(self) -> None:
        self._due: list[CycleWriter] = []

    def add(self, writer: CycleWriter) -> None:
        """Have it flushed."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(writer)

    def _run(self) -> None:
        due, self._due = self._due, []
        for writer in due:
            writer.flush()


class CycleWriter:
    """See `DirectWriter`: what `RequestResponseCycle.send` does for a piece of a chunked body."""

    def __init__(self, cycle: Any, round_: WriteRound) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._round = round_
        self._pieces: list[bytes] = []
        self._notes: list[Callable[[], None]] = []

    def write(self, data: bytes) -> bool:
        """Write it as a chunk of its own when the round ends, unless the client reads too slowly."""
        if self._flow.write_paused:
            return False
        if not self._pieces:
            self._round.add(self)
        self._pieces.append(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def when_written(self, note: Callable[[], None]) -> None:
        """Have it called right before the next flush that there is something for."""
        if self._pieces:
            self._notes.append(note)
        else:
            note()

    def flush(self) -> None:
        """Write now; to who is gone, nothing."""
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            notes, self._notes = self._notes, []
            if not self._cycle.disconnected:
                for note in notes:
                    note()
                self._cycle.transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
