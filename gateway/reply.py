"""The HTTP answer of a generation call: one JSON body, or server-sent events.

Its status goes out with the first byte of content and not before, so that a request that fails early fails
with a status. Knows no tokens.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import RequestRejected
from gateway.errors import error_headers, error_object

DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """Write compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class JSONBody(Response):
    """A response with a JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write the body."""
        return to_json(content)


def error_response(error: RequestRejected, headers: dict[str, str] | None = None) -> JSONBody:
    """Return the response that a failure becomes."""
    return JSONBody(error_object(error), error.status, headers=(headers or {}) | error_headers(error))


class Reply:
    """Writes the answer to one call; several choices may write events at the same time."""

    def __init__(self, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._headers = {"x-request-id": request_id}
        self._asgi = (scope, receive, send)
        self._send = send
        self._streaming = False
        self._lock = asyncio.Lock()  # the start must be out before the first event, whoever writes it

    async def body(self, content: dict[str, Any]) -> None:
        """Answer with one JSON object."""
        await JSONBody(content, headers=self._headers)(*self._asgi)

    async def event(self, data: dict[str, Any]) -> None:
        """Send an event, behind the status line if it is the first."""
        await self._write(b"data: " + to_json(data) + b"\n\n")

    async def done(self) -> None:
        """End a stream that succeeded."""
        await self._write(DONE)
        await self._end()

    async def fail(self, error: RequestRejected) -> None:
        """Answer with an error: as a response, or in a stream as its last event, with no [DONE]."""
        if self._streaming:
            await self.event(error_object(error))
            await self._end()
        else:
            await error_response(error, self._headers)(*self._asgi)

    async def _write(self, data: bytes) -> None:
        async with self._lock:
            if not self._streaming:
                self._streaming = True
                headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                raw = [(k.encode(), v.encode()) for k, v in (headers | self._headers).items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": raw})
            # Waits while the client reads too slowly: then events wait in the node's stream.
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
