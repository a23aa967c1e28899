"""Many streamed completions at once from one thread, noting when each token came.

Bytes are noted as they come and read afterwards, so that the client takes little of what it measures. It
knows HTTP only as far as to send a request and to tell a token's event from others.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from common.errors import LocalError

_TOKEN = b'"token_ids":'
_END = b"data: [DONE]"
_READ_BYTES = 1 << 16


@dataclass(eq=False, slots=True)
class TokenStream:
    """One request and what came of it, by time."""

    connection: socket.socket
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def has_token(self) -> bool:
        """A token is here."""
        return any(_TOKEN in data for _, data in self.pieces)

    @property
    def is_done(self) -> bool:
        """The answer is whole."""
        return _END in b"".join(data for _, data in self.pieces[-3:])  # it may be cut

    def token_times(self) -> list[float]:
        """Return when each token came; several may have come at once."""
        times: list[float] = []
        tail = b""
        for at_s, data in self.pieces:
            data = tail + data
            times += [at_s] * data.count(_TOKEN)
            # A token's mark may be cut in two; one that was counted must not be seen again.
            end = data.rfind(_TOKEN)
            rest = data if end < 0 else data[end + len(_TOKEN) :]
            tail = rest[-(len(_TOKEN) - 1) :]
        return times


class StreamClient:
    """Asks one server; not thread-safe."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = (parts.hostname, parts.port)
        self._selector = selectors.DefaultSelector()

    def start(self, body: dict[str, Any]) -> TokenStream:
        """Send a request for a streamed completion."""
        data = json.dumps(body | {"stream": True, "return_token_ids": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\n"
            f"Host: {self._address[0]}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        connection = socket.create_connection(self._address)
        connection.sendall(head.encode() + data)
        stream = TokenStream(connection)
        self._selector.register(connection, selectors.EVENT_READ, stream)
        return stream

    def read_until(self, done: Callable[[], bool], patience_s: float) -> None:
        """Read all streams until it is so.

        Raises:
            LocalError: it did not happen in time, or the server refused a request.
        """
        give_up_s = time.perf_counter() + patience_s
        while not done():
            if time.perf_counter() > give_up_s:
                raise LocalError(f"the server did not answer within {patience_s:g} s")
            for key, _ in self._selector.select(0.01):
                stream: TokenStream = key.data
                data = stream.connection.recv(_READ_BYTES)
                stream.pieces.append((time.perf_counter(), data))
                if len(stream.pieces) == 1 and not data.startswith(b"HTTP/1.1 200 "):
                    raise LocalError(f"the server answered {data.decode(errors='replace')!r}")
                if not data:
                    self._selector.unregister(stream.connection)

    def read_for(self, seconds: float) -> None:
        """Read all streams for so long."""
        end_s = time.perf_counter() + seconds
        self.read_until(lambda: time.perf_counter() >= end_s, 2 * seconds + 1)

    def close(self, streams: Sequence[TokenStream]) -> None:
        """Leave; the server sees it, and ends what is not done."""
        self._selector.close()
        for stream in streams:
            stream.connection.close()
