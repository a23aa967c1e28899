"""Many streamed completions at once from one thread, noting when which bytes came.

The client takes little of what it measures: it never blocks on one socket, and looks at bytes only as far as
to see that a stream began or ended. `answers.py` reads them afterwards.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from common.errors import ConfigError

_EVENT = b"data:"
_LAST_CHUNK = b"0\r\n\r\n"  # of a chunked body; at the begin of a line
_READ_BYTES = 1 << 16
_LONGEST_WAIT_S = 0.1
_ROUNDED_S = 0.001  # epoll waits for whole milliseconds, rounded up: the last one is spent looking


@dataclass(eq=False, slots=True)
class TokenStream:
    """One request and what came of it, by time (`time.perf_counter`, seconds)."""

    begun_s: float  # before it connects
    connection: socket.socket
    unsent: memoryview
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    has_event: bool = False
    is_done: bool = False  # nothing more will come
    failure: str = ""  # of the connection


class StreamClient:
    """Asks one server; not thread-safe.

    Args:
        url: of the server, without /v1.
        api_key: that the server asks for.

    Raises:
        ConfigError: it is no address of http.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ConfigError(f"{url} is not an address like http://127.0.0.1:8000")
        self._host = parts.netloc
        self._authorization = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._path = parts.path.rstrip("/") + "/v1/completions"
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"{url}: {error.strerror}") from None
        self._family, self._address = found[0][0], found[0][4]
        self._selector = selectors.DefaultSelector()
        self._open: set[TokenStream] = set()
        self.last_read_s = 0.0

    @property
    def num_open(self) -> int:
        """Streams that are not done."""
        return len(self._open)

    def encode(self, body: dict[str, Any]) -> bytes:
        """Write a request; ahead of time, as that of a long prompt takes milliseconds."""
        data = json.dumps(body | {"stream": True}, separators=(",", ":")).encode()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"{self._authorization}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    def start(self, request: bytes) -> TokenStream:
        """Begin to send a request that `encode` wrote."""
        begun_s = time.perf_counter()
        connection = socket.socket(self._family, socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.connect_ex(self._address)  # what becomes of it is seen when something is sent
        stream = TokenStream(begun_s, connection, memoryview(request))
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, stream)
        self._open.add(stream)
        return stream

    def poll(self, timeout_s: float) -> list[TokenStream]:
        """Send and read what is possible now; wait for it so long at most. Returns the streams that ended."""
        ended = []
        for key, events in self._selector.select(max(0.0, min(timeout_s - _ROUNDED_S, _LONGEST_WAIT_S))):
            stream: TokenStream = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    self._send(stream)
                if events & selectors.EVENT_READ and not self._receive(stream):
                    ended.append(stream)
            except BlockingIOError:
                continue
            except OSError as error:
                stream.failure = error.strerror or str(error)
                ended.append(stream)
        self._end(ended)
        return ended

    def _send(self, stream: TokenStream) -> None:
        stream.unsent = stream.unsent[stream.connection.send(stream.unsent) :]
        if not stream.unsent:
            self._selector.modify(stream.connection, selectors.EVENT_READ, stream)

    def _receive(self, stream: TokenStream) -> bool:
        """Read once; returns whether more may come."""
        data = stream.connection.recv(_READ_BYTES)
        self.last_read_s = now_s = time.perf_counter()
        stream.pieces.append((now_s, data))
        if not stream.has_event:
            stream.has_event = _EVENT in data
        return not (not data or data == _LAST_CHUNK or data.endswith(b"\n" + _LAST_CHUNK))

    def _end(self, streams: Iterable[TokenStream]) -> None:
        for stream in streams:
            self._selector.unregister(stream.connection)
            stream.connection.close()
            stream.is_done = True
            self._open.discard(stream)

    def leave(self, failure: str = "") -> None:
        """End all streams that are open; the server sees it, and frees what they hold."""
        for stream in self._open:
            stream.failure = failure
        self._end(list(self._open))

    def read_until(self, done: Callable[[], bool], patience_s: float) -> None:
        """Read all streams until it is so.

        Raises:
            ConfigError: it did not happen in time.
        """
        give_up_s = time.perf_counter() + patience_s
        while not done():
            if time.perf_counter() > give_up_s:
                raise ConfigError(f"the server did not answer within {patience_s:g} s")
            self.poll(_LONGEST_WAIT_S)

    def read_for(self, seconds: float) -> None:
        """Read all streams for so long."""
        end_s = time.perf_counter() + seconds
        while (left_s := end_s - time.perf_counter()) > 0:
            self.poll(left_s)
