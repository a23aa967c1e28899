"""Clients that cost little: so many connections, read by one thread that counts events and parses nothing."""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import dataclass, field

_EVENT = b"data: "
_KEPT = len(_EVENT) - 1  # of what was read before: an event's head may come in two pieces
_LAST_CHUNK = b"\n0\r\n\r\n"
_READ_BYTES = 1 << 18
_MOST_FIRST = 1 << 16


@dataclass(eq=False, slots=True)
class Reader:
    """One connection, and what came of it."""

    connection: socket.socket
    tail: bytes = b""
    num_events: int = 0
    is_done: bool = False
    first: bytes = b""  # what was read first, to the end of the first event
    times_s: list[float] | None = None  # when pieces with events came, where that is noted


@dataclass(eq=False)
class Readers:
    """All connections to one port of this host. `num_events` counts `data:` lines, [DONE] included."""

    port: int
    num_events: int = 0
    num_open: int = 0
    last_s: float = 0.0
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def start(self, path: str, body: bytes, headers: str = "", *, notes_times: bool = False) -> Reader:
        """Send one request."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        connection.setblocking(False)
        reader = Reader(connection, times_s=[] if notes_times else None)
        self.selector.register(connection, selectors.EVENT_READ, reader)
        self.num_open += 1
        return reader

    def poll(self, timeout_s: float | None) -> None:
        """Read what is there; wait for it so long at most."""
        for key, _ in self.selector.select(timeout_s):
            if isinstance(key.data, Reader):
                self._read(key.data)

    def _read(self, reader: Reader) -> None:
        data = reader.connection.recv(_READ_BYTES)
        seen = reader.tail + data
        reader.tail = seen[-_KEPT:]
        if found := seen.count(_EVENT):
            reader.num_events += found
            self.num_events += found
            self.last_s = time.perf_counter()
            if reader.times_s is not None:
                reader.times_s.append(self.last_s)
        if b"\n\n" not in reader.first and len(reader.first) < _MOST_FIRST:
            reader.first += data
        if not data or data.endswith(_LAST_CHUNK):
            reader.is_done = True
            self.selector.unregister(reader.connection)
            reader.connection.close()
            self.num_open -= 1

    def close(self) -> None:
        """Leave whoever is not done."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, Reader):
                key.data.connection.close()
        self.selector.close()
