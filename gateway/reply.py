"""The HTTP answer of a generation call: one JSON body, or server-sent events.

Its status goes out with the first byte of content and not before, so that a request that fails early fails
with a status. Events are written at once while the client keeps up, and wait here while it does not. Knows no
tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import RequestRejected
from gateway.errors import error_headers, error_object
from gateway.rows import to_json, to_json_in_slices

DONE = b"data: [DONE]\n\n"
DIRECT = "baton.direct"  # of scope["extensions"]: has the connection's DirectWriter as `writer`
RECEIVED = "baton.received"  # the same: has `at_s`, when the request's first bytes came (time.monotonic())


class DirectWriter(Protocol):
    """Writes to the client's socket without a coroutine, behind ASGI's back; only once a response began."""

    def write(self, data: bytes) -> bool:
        """Write a piece of the body soon; False, and nothing is, while the client reads too slowly."""
        ...

    def when_written(self, note: Callable[[], None]) -> None:
        """Have it called right before what is to be written soon is; at once, where there is nothing."""
        ...

    def flush(self) -> None:
        """Write now what is to be written soon; to be called before anything goes another way."""
        ...


class JSONBody(Response):
    """A response with a JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write the body."""
        return to_json(content)


def error_response(error: RequestRejected, headers: dict[str, str] | None = None) -> JSONBody:
    """Return the response that a failure becomes."""
    return JSONBody(error_object(error), error.status, headers=(headers or {}) | error_headers(error))


def event_of(data: dict[str, Any]) -> bytes:
    """Write an event of a stream."""
    return b"data: " + to_json(data) + b"\n\n"


class Reply:
    """Writes the answer to one call; `close` it when the call is over."""

    def __init__(self, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._headers = {"x-request-id": request_id}
        self._asgi = (scope, receive, send)
        self._send = send
        self._direct: DirectWriter | None = scope.get("extensions", {}).get(DIRECT, {}).get("writer")
        self._streaming = False
        self._has_begun = False  # its status line is out
        self._waiting: list[bytes] = []  # written by the task, in order
        self._notes: list[Callable[[], None]] = []  # called then
        self._writing: asyncio.Task[None] | None = None

    async def body(self, content: dict[str, Any]) -> None:
        """Answer with one JSON object."""
        data = await to_json_in_slices(content)
        await Response(data, headers=self._headers, media_type=JSONBody.media_type)(*self._asgi)

    def write(self, events: bytes) -> None:
        """Send events, behind the status line if they are the first; what cannot go yet waits."""
        if self._writing is None:
            if self._streaming and self._direct is not None and self._direct.write(events):
                return
            if self._direct is not None:
                self._direct.flush()
            self._streaming = True
            self._waiting.append(events)
            self._writing = asyncio.create_task(self._write_waiting())
        else:
            self._waiting.append(events)

    def when_written(self, note: Callable[[], None]) -> None:
        """Have it called right before the client's socket gets the last of all events so far.

        Before, because the client may have them before we go on.
        """
        if self._writing is not None:
            self._notes.append(note)
        elif self._direct is not None:
            self._direct.when_written(note)
        else:
            note()

    async def done(self) -> None:
        """End a stream that succeeded."""
        self.write(DONE)
        await self._end()

    async def fail(self, error: RequestRejected) -> None:
        """Answer with an error: as a response, or in a stream as its last event, with no [DONE]."""
        if self._streaming:
            self.write(event_of(error_object(error)))
            await self._end()
        else:
            await error_response(error, self._headers)(*self._asgi)

    def close(self) -> None:
        """Write no more: nobody reads, or all was read."""
        if self._writing is not None:
            self._writing.cancel()

    async def _end(self) -> None:
        if self._writing is not None:
            await self._writing
        if self._direct is not None:
            self._direct.flush()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_waiting(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            raw = [(k.encode(), v.encode()) for k, v in (headers | self._headers).items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        while self._waiting:
            data, self._waiting = b"".join(self._waiting), []
            notes, self._notes = self._notes, []
            # Waits while the client reads too slowly; meanwhile more comes to wait.
            if notes:
                await self._send({"type": "http.response.body", "body": b"", "more_body": True})
                for note in notes:
                    note()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing = None
