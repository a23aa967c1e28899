"""The HTTP server, and its end: no new connections, what runs finishes within a grace, the rest is told.

It must not know what a request is: whoever has them ends them when asked.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from common.drain import Drain
from gateway.connections import DEFAULT_LIMITS, ConnectionLimits, protocol_with

log = logging.getLogger("baton.gateway")

CLOSE_S = 1.0  # what clients have to read their last words


class GatewayServer(uvicorn.Server):
    """Serves an application; ends on SIGTERM or SIGINT as `drain` says.

    Args:
        end_requests: ends all requests with an error.
        told_to_end: is called when a signal comes.
        limits: of connections.
    """

    def __init__(
        self,
        app: FastAPI,
        drain: Drain,
        end_requests: Callable[[], None],
        limits: ConnectionLimits = DEFAULT_LIMITS,
        told_to_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol_with(limits, app.state.metrics),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                # Of no effect but where a connection cannot be closed.
                timeout_graceful_shutdown=int(drain.grace_s + 2 * CLOSE_S),
            )
        )
        self._drain = drain
        self._end_requests = end_requests
        self._told_to_end = told_to_end
        self._loop: asyncio.AbstractEventLoop

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to end."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal, between any two instructions. uvicorn's own would raise it once more in the end."""
        self._loop.call_soon_threadsafe(self._told, sig)

    def _told(self, signum: int) -> None:
        now = self._loop.time()
        self._told_to_end()
        if self._drain.told(signum, now):
            log.info("told to end: no new requests, and at most %g s for those that run", self._drain.grace_s)
            self._loop.call_later(self._drain.grace_s, self._end)
        elif self._drain.is_over(now, lambda: False):  # a second SIGTERM may mean nothing
            self._end()
        self.should_exit = True

    def _end(self) -> None:
        self._end_requests()
        self._loop.call_later(CLOSE_S, self._stop_waiting)

    def _stop_waiting(self) -> None:
        self.force_exit = True
