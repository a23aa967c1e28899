"""A gateway of a test's own, with its own limits, on a real socket."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from common.config import GatewayConfig
from common.drain import Drain
from gateway.app import build_app
from gateway.connections import ConnectionLimits
from gateway.fake import FakeNodes
from gateway.server import GatewayServer
from gateway.text import TextPipeline
from gateway.tracing import Tracing
from tests.gateway.conftest import LIMITS, MODEL, LiveServer


@contextmanager
def live_gateway(
    text: TextPipeline,
    config: GatewayConfig,
    limits: ConnectionLimits | None = None,
    tracing: Tracing | None = None,
) -> Iterator[LiveServer]:
    """Run one in a thread."""
    nodes = FakeNodes()
    limits = limits or ConnectionLimits(config.max_connections, config.client_timeout)
    app = build_app(nodes, text, config, MODEL, LIMITS, tracing)
    server = GatewayServer(app, Drain(0), lambda: None, limits)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        try:
            yield LiveServer(nodes, sock.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()
