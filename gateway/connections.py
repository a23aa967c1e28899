"""What a client's connection may take: how many there are, how long a request's head, how slow it comes.

    more than the limit        503 for requests; beyond a reserve, closed at once
    a head of over 64 KiB      431; as much behind a body's last byte, too (trailers)
    a head that is too slow    408; an idle connection is closed by then
    a body that is too slow    408 (`body.py`, which reads it); what nobody reads any more, closed

Written on uvicorn's protocol, which has no limits of this kind. Knows no route but those that are always
answered.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.config import GatewayConfig
from common.errors import RequestRejected
from gateway.api_key import OPEN_PATHS
from gateway.direct import CycleWriter, WriteRound
from gateway.failures import CountsFailures, Failure
from gateway.reply import DIRECT, RECEIVED, error_response

log = logging.getLogger("baton.gateway")

MAX_HEAD_BYTES = 64 << 10
RESERVE = 64  # connections beyond the limit that are told so
OTHER_DESCRIPTORS = 128  # of this process: sockets, pidfds, files
CLOSE = {"Connection": "close"}

OVERLOADED = RequestRejected(
    "too many connections: close some, or come again", status=503, code="overloaded", retry_after_s=1
)
HEAD_TOO_LARGE = RequestRejected(
    f"the request's headers are larger than {MAX_HEAD_BYTES} bytes", status=431, code="headers_too_large"
)
TOO_SLOW = RequestRejected("the request did not come in time", status=408, code="request_timeout")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What clients may take."""

    max_connections: int = GatewayConfig().max_connections
    timeout_s: float = GatewayConfig().client_timeout  # for a head, and for a body


def make_room_for(max_connections: int) -> None:
    """Raise the limit of file descriptors to what so many connections need, or say that it is too low."""
    needed = max_connections + RESERVE + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    room = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
    if room < needed:
        log.warning(
            "--max-connections %d needs %d file descriptors, and the limit is %d: raise it (ulimit -n), or "
            "allow fewer connections",
            max_connections,
            needed,
            room,
        )


def protocol_with(limits: ConnectionLimits, failures: CountsFailures) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with these limits."""
    own = {"limits": limits, "round": WriteRound(), "failures": failures}
    return type("Protocol", (LimitedProtocol,), own)


DEFAULT_LIMITS = ConnectionLimits()


class LimitedProtocol(HttpToolsProtocol):
    """One connection of a client."""

    limits: ClassVar[ConnectionLimits]
    round: ClassVar[WriteRound]
    failures: ClassVar[CountsFailures]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or close it when there are too many."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._normal_app = self.app
        if len(self.connections) > self.limits.max_connections + RESERVE:
            self.failures.failed(Failure.OVERLOADED)
            transport.abort()
            return
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; a head that does not end is not kept, nor are trailers."""
        self._got_on = False
        super().data_received(data)
        if (self._in_head or not self._got_on) and not self.transport.is_closing():
            # Counted once more by `on_header`, as far as headers are whole: that only matters near the limit.
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > MAX_HEAD_BYTES:
                if self._in_head or not self.cycle.response_started:
                    self._answer_and_close(HEAD_TOO_LARGE)
                else:
                    self.transport.close()

    # Of the parser ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """The first byte of a request: from now on its head has to come."""
        super().on_message_begin()
        self._received_s = time.monotonic()
        self._in_head = True
        self._head_bytes = self._unfinished_bytes = 0
        self._expect()

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header."""
        self._head_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole: decide who answers. The body comes now."""
        self._in_head = False
        self._got_on = True
        self._unfinished_bytes = 0
        self.app = self._normal_app
        if self._head_bytes > MAX_HEAD_BYTES:
            self.app = _refusing(HEAD_TOO_LARGE)
            self.url = b"/"  # the parser of targets takes no longer ones
        elif len(self.connections) > self.limits.max_connections:
            self.app = _refusing(OVERLOADED, otherwise=self._normal_app, refused=self._overloaded)
        self._expect()
        super().on_headers_complete()
        # Its task has not begun.
        writer = CycleWriter(self.cycle, self.round)
        self.scope["extensions"] = {DIRECT: {"writer": writer}, RECEIVED: {"at_s": self._received_s}}

    def on_body(self, body: bytes) -> None:
        """A part of the body, whose size is for who reads it to bound."""
        self._got_on = True
        self._unfinished_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._got_on = True
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Say that this is no HTTP."""
        self._answer_and_close(RequestRejected(msg, code="invalid_http"))

    # --------------------------------------------------------------------------------------------------------

    _unfinished_bytes = 0
    _got_on = False  # with what was read last: a head ended, a part of a body or the end of it came

    def _expect(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.limits.timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing() or is_answering:
            return  # whoever answers reads the body, with a time of its own
        if self._in_head:
            if self._unfinished_bytes:  # else it was opened, and not used
                self.failures.failed(Failure.CLIENT_SLOW)
            self._answer_and_close(TOO_SLOW)
        else:
            self.transport.close()

    def _overloaded(self) -> None:
        self.failures.failed(Failure.OVERLOADED)

    def _answer_and_close(self, error: RequestRejected) -> None:
        answer = error_response(error, CLOSE)
        lines = [f"HTTP/1.1 {answer.status_code} {error.code}".encode()]
        lines += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()


def _refusing(
    error: RequestRejected, otherwise: ASGIApp | None = None, refused: Callable[[], None] = lambda: None
) -> ASGIApp:
    """An application that refuses everything, but for what is always answered when there is `otherwise`."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        app: Any = error_response(error, CLOSE)
        if otherwise is not None and scope["path"] in OPEN_PATHS:
            app = otherwise
        else:
            refused()
        await app(scope, receive, send)

    return refuse
